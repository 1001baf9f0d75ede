// What test_ollama_clients.py asks of the JavaScript package: two servers, a real model and one that calls.
import { Ollama } from "ollama";

const [real, calling, question] = process.argv.slice(2);
const client = new Ollama({ host: real });
const messages = [{ role: "user", content: question }];
const ask = { model: "smollm2", messages, options: { temperature: 0, num_predict: 5 } };
const told = {};

told.models = (await client.list()).models.map((model) => model.name);
told.chat = (await client.chat(ask)).message.content;
told.stream = "";
for await (const part of await client.chat({ ...ask, stream: true })) {
  told.stream += part.message.content;
  told.done = part.done_reason ?? told.done;
  told.count = part.eval_count ?? told.count;
}
told.generate = "";
const made = { model: "smollm2", prompt: question, options: ask.options };
for await (const part of await client.generate({ ...made, stream: true })) {
  told.generate += part.response;
}
const format = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const formed = { ...ask, format, options: { temperature: 0 } };
told.format = JSON.parse((await client.chat(formed)).message.content);
told.show = (await client.show({ model: "smollm2" })).model_info["general.architecture"];
told.ps = (await client.ps()).models.map((model) => model.context_length);
told.version = (await client.version()).version;
try {
  await client.chat({ ...ask, model: "missing" });
} catch (error) {
  told.error = [error.name, error.status_code, error.message];
}

const tools = [
  { type: "function", function: { name: "get_weather", parameters: { type: "object" } } },
];
const caller = new Ollama({ host: calling });
told.calls = [];
for await (const part of await caller.chat({ model: "m", messages, tools, stream: true })) {
  told.calls.push(...(part.message.tool_calls ?? []));
}
console.log(JSON.stringify(told));

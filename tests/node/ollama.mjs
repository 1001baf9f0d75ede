// What test_ollama_clients.py asks of the JavaScript package: two servers, a real model and one that calls.
import { Ollama } from "ollama";

const [real, calling, question] = process.argv.slice(2);
const client = new Ollama({ host: real });
const messages = [{ role: "user", content: question }];
const ask = { model: "smollm2", messages, options: { temperature: 0, num_predict: 5 } };
const seen = {};

seen.models = (await client.list()).models.map((model) => model.name);
seen.chat = (await client.chat(ask)).message.content;
seen.stream = "";
for await (const part of await client.chat({ ...ask, stream: true })) {
  seen.stream += part.message.content;
  seen.done = part.done_reason ?? seen.done;
  seen.count = part.eval_count ?? seen.count;
}
seen.generate = "";
const made = { model: "smollm2", prompt: question, options: ask.options };
for await (const part of await client.generate({ ...made, stream: true })) {
  seen.generate += part.response;
}
const format = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const formed = { ...ask, format, options: { temperature: 0 } };
seen.format = JSON.parse((await client.chat(formed)).message.content);
seen.show = (await client.show({ model: "smollm2" })).model_info["general.architecture"];
seen.ps = (await client.ps()).models.map((model) => model.context_length);
seen.version = (await client.version()).version;
try {
  await client.chat({ ...ask, model: "missing" });
} catch (error) {
  seen.error = [error.name, error.status_code, error.message];
}

const tools = [
  { type: "function", function: { name: "get_weather", parameters: { type: "object" } } },
];
const caller = new Ollama({ host: calling });
seen.calls = [];
for await (const part of await caller.chat({ model: "m", messages, tools, stream: true })) {
  seen.calls.push(...(part.message.tool_calls ?? []));
}
console.log(JSON.stringify(seen));

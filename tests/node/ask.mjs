// What test_real_clients.py asks of openai-node: a chat, a stream, a response, an error, as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: process.argv[3] }];
const ask = { model: "smollm2", messages, max_completion_tokens: 5, temperature: 0 };
const told = {};

told.chat = (await client.chat.completions.create(ask)).choices[0].message.content;

const stream = await client.chat.completions.create({
  ...ask,
  stream: true,
  stream_options: { include_usage: true },
});
told.stream = "";
for await (const chunk of stream) {
  told.stream += chunk.choices[0]?.delta?.content ?? "";
  told.usage = chunk.usage?.completion_tokens ?? told.usage;
}

const response = { model: "smollm2", input: process.argv[3], max_output_tokens: 5, temperature: 0 };
told.response = (await client.responses.create(response)).output_text;
told.events = [];
for await (const event of await client.responses.create({ ...response, stream: true })) {
  told.events.push(event.type);
}
try {
  await client.models.retrieve("missing");
} catch (error) {
  told.error = [error.constructor.name, error.status, error.code];
}
console.log(JSON.stringify(told));

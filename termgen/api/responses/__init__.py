"""/v1/responses, OpenAI's newer endpoint: `body` has the way in, `answer` the way out and the
row."""

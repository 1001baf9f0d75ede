"""Pure translation between the wire formats of OpenAI and Anthropic and the engine's vocabulary.

Reading order: `fields` (how a body is declared and checked) -> `sampling` -> `chat` / `completions`
(a body to `Job`s, `TokenDelta`s to chunks and responses) -> `logprobs`, `errors`, `sse`. No I/O.
"""

"""Pure translation between OpenAI's wire formats and the engine's vocabulary. No I/O.

Reading order: `fields` (a JSON body taken apart) -> `sampling` -> `chat` / `completions` (body to
`Job`s, `TokenDelta`s to chunks and responses) -> `logprobs`, `usage`, `errors`, `sse`.
"""

"""Ollama's API: /api/chat, /api/generate and what its clients ask of a server about its models.

`body` declares the requests, `options` and `messages` translate their parts into a chat's words,
`parser` puts these together, `answers` writes what comes back, line by line or whole, `shown`
describes models, and `pull` reports how one is fetched.
"""

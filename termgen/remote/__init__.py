"""A remote OpenAI-compatible server as an `EngineClient`."""

"""A model server elsewhere, as an `EngineClient`: any OpenAI-compatible one, over HTTP."""

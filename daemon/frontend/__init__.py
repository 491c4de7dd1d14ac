"""The OpenAI-compatible HTTP front: schema, app, server-sent events."""

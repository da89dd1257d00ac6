"""HTTP: OpenAI's API over an engine. Only this package knows the ASGI framework."""

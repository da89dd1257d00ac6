"""OpenAI's routes: what a request may say, and how outputs become responses."""

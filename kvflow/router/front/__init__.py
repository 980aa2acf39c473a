"""The router as a process of its own: an OpenAI-compatible HTTP front before several servers."""

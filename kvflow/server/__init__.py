"""An OpenAI-compatible HTTP front for any `kvflow.engine.api.EngineClient`."""

from kvflow.server.app import ServerConfig, make_app
from kvflow.server.serve import RunningServer, bind, serve
from kvflow.server.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "RunningServer",
    "ServerConfig",
    "TextTokenizer",
    "bind",
    "load_tokenizer",
    "make_app",
    "serve",
]

"""kvflow: describe where KV-cache bytes live, derive transfers, prove them, move them."""

__version__ = "0.1.0"

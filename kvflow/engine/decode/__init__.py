"""The decode engine: one data-parallel group of ranks that continues prefilled requests.

`engine` decides (on the group's leader), `worker` does (on every rank), `turns` is what they say
to each other, `requests` what they talk about.
"""

from kvflow.engine.decode.engine import DecodeEngine

__all__ = ["DecodeEngine"]

"""Access to a KV cache that several ranks share, during a step (docs/context-access.md)."""

from kvflow.engine.access.counters import Counters, Fetched, Moment, StepLog
from kvflow.engine.access.memory import PagedMemory
from kvflow.engine.access.options import AccessOptions
from kvflow.engine.access.shard import LocalRows, PageShard, ShardRows
from kvflow.engine.access.shards import AttendShard, ShardedAttention, ShardQueries
from kvflow.engine.access.step import PagedStep

__all__ = [
    "AccessOptions",
    "AttendShard",
    "Counters",
    "Fetched",
    "LocalRows",
    "Moment",
    "PageShard",
    "PagedMemory",
    "PagedStep",
    "ShardQueries",
    "ShardRows",
    "ShardedAttention",
    "StepLog",
]

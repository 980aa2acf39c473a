"""Describe: immutable values that say where every KV byte of a request lives."""

from kvflow.layouts.arrangement import Arrangement, Plane
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, CacheGroup, HeadShard, KVLayout, Stage
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Dense, GlobalSlot, LocalSlot, Paged, Pool
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.layouts.sharding import Replicated, RoundRobin, Runs, Sharding
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec

__all__ = [
    "GLM_5_3",
    "Arrangement",
    "Axis",
    "BalancedChunks",
    "Binding",
    "CacheGroup",
    "Component",
    "Contiguous",
    "Dense",
    "Field",
    "GlobalSlot",
    "HeadShard",
    "KVCacheSpec",
    "KVLayout",
    "LocalSlot",
    "Mesh",
    "Paged",
    "Placement",
    "Plane",
    "Pool",
    "Record",
    "Replicated",
    "RoundRobin",
    "Runs",
    "Sharding",
    "Stage",
    "index_record",
    "latent_record",
]

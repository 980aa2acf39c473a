"""Describe: immutable values that say where every KV byte of a request lives."""

from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Dense, GlobalSlot, LocalSlot, Paged, Pool
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.layouts.sharding import Replicated, RoundRobin, Runs, Sharding
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec

__all__ = [
    "GLM_5_3",
    "Axis",
    "BalancedChunks",
    "Binding",
    "CacheGroup",
    "Component",
    "Contiguous",
    "Dense",
    "Field",
    "GlobalSlot",
    "KVCacheSpec",
    "KVLayout",
    "LocalSlot",
    "Mesh",
    "Paged",
    "Placement",
    "Pool",
    "Record",
    "Replicated",
    "RoundRobin",
    "Runs",
    "Sharding",
    "index_record",
    "latent_record",
]

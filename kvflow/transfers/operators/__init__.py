"""Operators: typed stages between layouts, and pipelines that only accept stages that fit.

An operator says from which layout to which it goes and which components it claims. Its law: for
every token of the range it is run on and every claimed component and field,
read(target, t) == read(source, t), and no other byte of the target changes.
"""

from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.files import FileTier, FromFiles, Stored, ToFiles
from kvflow.transfers.operators.gather import AllGather, GatherReport
from kvflow.transfers.operators.hotfetch import (
    DeviceSlots,
    FetchReport,
    HostSlots,
    HotFetch,
    Misses,
    index_groups,
)
from kvflow.transfers.operators.merge import PartialAttention, ReduceScatter, merge_partials
from kvflow.transfers.operators.offload import Offload, RankLocal, Restore
from kvflow.transfers.operators.pipeline import Pipeline
from kvflow.transfers.operators.protocol import Caches, Operator, Tokens, bind
from kvflow.transfers.operators.quantize import Dequantize, Quantize
from kvflow.transfers.operators.reassemble import Reassemble, ViaEndpoints, ViaPush

__all__ = [
    "AllGather",
    "Caches",
    "Dequantize",
    "DeviceSlots",
    "FetchReport",
    "FileTier",
    "FromFiles",
    "GatherReport",
    "HostSlots",
    "HotFetch",
    "Misses",
    "Offload",
    "Operator",
    "PartialAttention",
    "Pipeline",
    "Quantize",
    "RankLocal",
    "Reassemble",
    "ReduceScatter",
    "Restore",
    "Stored",
    "ToFiles",
    "Tokens",
    "ViaEndpoints",
    "ViaPush",
    "bind",
    "first_difference",
    "index_groups",
    "merge_partials",
]

"""Operators: typed stages between layouts, and pipelines that only accept stages that fit.

An operator says from which layout to which it goes and which components it claims. Its law: for
every token of the range it is run on and every claimed component and field,
read(target, t) == read(source, t), and no other byte of the target changes.
"""

from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.gather import AllGather, GatherReport
from kvflow.transfers.operators.pipeline import Pipeline
from kvflow.transfers.operators.protocol import Caches, Operator, Tokens, bind
from kvflow.transfers.operators.reassemble import Reassemble, ViaEndpoints, ViaPush

__all__ = [
    "AllGather",
    "Caches",
    "GatherReport",
    "Operator",
    "Pipeline",
    "Reassemble",
    "Tokens",
    "ViaEndpoints",
    "ViaPush",
    "bind",
    "first_difference",
]

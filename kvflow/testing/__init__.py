"""For people who embed kvflow: strategies that draw layouts, an oracle that shares no code with
the planner, and the laws that every executor and operator must keep. Nothing in kvflow imports
this package."""

from kvflow.testing.attention import Attention, check_reduce_scatter, scatter_on_threads
from kvflow.testing.conversion import ConversionTags
from kvflow.testing.law import LawError, MakeCache, Move, check_law
from kvflow.testing.operators import check_fetch, check_operator, on_threads
from kvflow.testing.oracle import Cell, cells, deal, page_cells, tag
from kvflow.testing.pairs import Covering, covering_rows, pairs_of
from kvflow.testing.strategies import (
    Case,
    arrangements,
    bindings,
    cases,
    layouts,
    pagings,
    placements,
    rearranged,
    shardings,
    specs,
    token_ranges,
)

__all__ = [
    "Attention",
    "Case",
    "Cell",
    "ConversionTags",
    "Covering",
    "LawError",
    "MakeCache",
    "Move",
    "arrangements",
    "bindings",
    "cases",
    "cells",
    "check_fetch",
    "check_law",
    "check_operator",
    "check_reduce_scatter",
    "covering_rows",
    "deal",
    "layouts",
    "on_threads",
    "page_cells",
    "pagings",
    "pairs_of",
    "placements",
    "rearranged",
    "scatter_on_threads",
    "shardings",
    "specs",
    "tag",
    "token_ranges",
]

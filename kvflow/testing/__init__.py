"""For people who embed kvflow: strategies that draw layouts, an oracle that shares no code with
the planner, and the law that every executor must keep. Nothing in kvflow imports this package."""

from kvflow.testing.law import LawError, MakeCache, Move, check_law
from kvflow.testing.oracle import Cell, cells, deal, page_cells, tag
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
    "Case",
    "Cell",
    "LawError",
    "MakeCache",
    "Move",
    "arrangements",
    "bindings",
    "cases",
    "cells",
    "check_law",
    "deal",
    "layouts",
    "page_cells",
    "pagings",
    "placements",
    "rearranged",
    "shardings",
    "specs",
    "tag",
    "token_ranges",
]

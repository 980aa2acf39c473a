"""The file tier: one directory a key, one file a rank, and the executors that write and read it."""

import re
from pathlib import Path

import numpy as np
from attrs import evolve, field, frozen

from kvflow.errors import PlanError, TransferError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import Executor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.offload import RankLocal
from kvflow.transfers.operators.protocol import Caches, Tokens
from kvflow.transfers.operators.tierfile import (
    Contents,
    TierFile,
    empty_cache,
    open_file,
    write_file,
)
from kvflow.transfers.plan import Plan

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


@frozen(eq=False)
class Stored:
    """What a tier holds under a key: the tokens ``[start, stop)`` of `components` in `layout`, the
    placement that was in force when they were written."""

    key: str
    layout: KVLayout
    tokens: Tokens
    components: tuple[str, ...]
    files: dict[int, TierFile] = field(repr=False)

    @property
    def binding(self) -> Binding:
        """The source binding of a restore: entry i of every table is block i of the files."""
        need = self.layout.num_blocks_for(self.tokens[1])
        tables = {name: np.arange(n) for name, n in need.items()}
        return Binding.of(self.layout, tables, need, self.tokens[1])


@frozen(eq=False)
class FileTier:
    """Files under `directory`, written with pwrite and read with pread by any process that sees
    it. What is stored under a key never changes; `key` is a file name (a content hash)."""

    directory: Path = field(converter=Path)

    def path(self, key: str, rank: int) -> Path:
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise TransferError(f"the key {key!r} must be a file name that matches {_KEY.pattern}")
        return self.directory / key / f"rank{rank}.kv"

    def find(self, key: str) -> Stored:
        """Opens the files of all ranks. Raises `TransferError` if one is missing, foreign, short
        or damaged, or does not say the same as the others."""
        folder = self.path(key, 0).parent
        ranks = sorted(int(p.stem[4:]) for p in folder.glob("rank*.kv") if p.stem[4:].isdecimal())
        if not ranks:
            raise TransferError(f"nothing is stored under {key!r} in {self.directory}")
        files = {rank: open_file(self.path(key, rank), key, rank) for rank in ranks}
        first = files[ranks[0]].contents
        if set(ranks) != set(first.layout.ranks):
            raise TransferError(
                f"{key!r} was stored by ranks {list(first.layout.ranks)}, here are {ranks}"
            )
        for rank in ranks[1:]:
            one, other = (_said(c) for c in (first, files[rank].contents))
            if difference := first_difference(one, other):
                raise TransferError(f"{key!r}: ranks {ranks[0]} and {rank} differ: {difference}")
        return Stored(key, first.layout, first.tokens, first.components, files)


def _said(contents: Contents) -> tuple[object, ...]:
    return contents.layout, contents.tokens, contents.components


@frozen(eq=False)
class ToFiles:
    """Makes an executor of a tier: the target ranks that are given as sources write their files;
    the target caches are not looked at. `via` moves rows into memory of the size of a file."""

    tier: FileTier
    key: str
    via: Executor = field(factory=RankLocal)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        plan = bound.plan
        moved = tuple(c for part in plan.parts for c in part.components)
        need = plan.dst.num_blocks_for(plan.tokens[1])
        payloads, caches = {}, {}
        for rank in sorted(set(plan.dst.ranks) & set(sources)):
            contents = Contents(self.key, rank, plan.dst, plan.tokens, moved, need)
            payload, caches[rank] = empty_cache(contents)
            payloads[rank] = contents, payload
        tables = {name: np.arange(n) for name, n in need.items()}
        in_order = Binding.of(plan.dst, tables, need, plan.tokens[1])
        self.via.execute(evolve(bound, dst=in_order), sources, caches)
        for rank, (contents, payload) in payloads.items():
            written = _blocks(plan, rank, target=True)
            write_file(self.tier.path(self.key, rank), contents, payload, written)


@frozen(eq=False)
class FromFiles:
    """Makes an executor of what is stored: the blocks that a plan reads come from the files, `via`
    moves them on; the source caches are not looked at."""

    stored: Stored
    via: Executor

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        plan, (start, stop) = bound.plan, self.stored.tokens
        if difference := first_difference(self.stored.layout, plan.src):
            raise PlanError(f"the plan reads another layout than is stored: {difference}")
        if plan.tokens[0] < start or plan.tokens[1] > stop:
            raise PlanError(f"the plan reads tokens {plan.tokens}, stored are {(start, stop)}")
        moved = {c for part in plan.parts for c in part.components}
        if missing := sorted(moved - set(self.stored.components)):
            raise PlanError(f"the plan reads {missing}, stored are {list(self.stored.components)}")
        caches = {
            rank: self.stored.files[rank].read(_blocks(plan, rank, target=False))
            for rank in {src_rank for src_rank, _ in plan.links}
        }
        self.via.execute(evolve(bound, src=self.stored.binding), caches, targets)


def _blocks(plan: Plan, rank: int, *, target: bool) -> dict[str, Ints]:
    """The block-table entries that a plan touches on a rank of one side, by group."""
    touched: dict[str, Ints] = {}
    for part in plan.parts:
        runs = part.runs
        name, layout = (part.dst_group, plan.dst) if target else (part.src_group, plan.src)
        ranks, local = (
            (runs.dst_rank, runs.dst_local) if target else (runs.src_rank, runs.src_local)
        )
        entries = page_of(local[ranks == rank], layout.group(name).paging.block_size)
        before = touched.get(name, np.empty(0, np.int64))
        touched[name] = np.union1d(before, entries)  # a run stays in its page
    return touched

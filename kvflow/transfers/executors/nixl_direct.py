"""Direct requests between a peer's bytes and ours, by prepared list or by address.

Names say what a READ does: `src` is the peer's side. A WRITE of the same request goes the other
way.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from attrs import field, frozen

from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Ints
from kvflow.transfers.cost import Strategy
from kvflow.transfers.executors.nixl_agent import Agent, Flight, Index, Op
from kvflow.transfers.executors.nixl_lists import (
    WHOLE,
    Grain,
    Kind,
    Peer,
    elements,
    grains,
)
from kvflow.transfers.executors.nixl_parts import Job
from kvflow.transfers.lower import PageGeometry, descriptors
from kvflow.transfers.slot_cuts import take_runs

POST_NBYTES = 8 << 20
POST_ITEMS = 1 << 12

Geometries = Mapping[str, PageGeometry]


@frozen(eq=False)
class Post:
    """One request. `mine` are the geometries of our cache."""

    peer: Peer
    mine: Geometries

    def post(self, agent: Agent, op: Op) -> Flight:
        raise NotImplementedError


@frozen(eq=False)
class ListPost(Post):
    """Elements `src` of a peer's prepared list to elements `dst` of ours."""

    kind: Kind
    grain: Grain
    src: Index
    dst: Index

    def post(self, agent: Agent, op: Op) -> Flight:
        lists = self.peer.lists(agent, self.mine, self.kind, self.grain)
        return agent.move_prepared(op, lists.local, self.dst, lists.remote, self.src)


@frozen(eq=False)
class AddressPost(Post):
    """``nbytes[i]`` bytes from ``src[i]`` at the peer to ``dst[i]`` here."""

    src: Ints = field()
    dst: Ints = field()
    nbytes: Ints = field()

    def post(self, agent: Agent, op: Op) -> Flight:
        return agent.move(op, self.peer.name, self.src, self.dst, self.nbytes)


def direct_posts(way: Strategy, job: Job, mine: Geometries, agent: Agent) -> Iterator[Post]:
    """The requests of a job that goes as "pages", "strided" or "runs", each bounded in bytes and
    items, so that lanes can share them."""
    if way == "runs":
        yield from _addressed(job, mine)
        return
    by_target = np.argsort(job.runs.dst, kind="stable")
    runs = take_runs(job.runs, by_target)
    if way == "pages":
        size = job.src.block_size
        both = page_of(runs.src, size), page_of(runs.dst, size)
        yield from _listed(job, (WHOLE, None, None), both, size, mine, agent)
        return
    for tokens, some in grains(runs, job.src, job.dst):
        grain = tokens, runs.src_heads, runs.dst_heads
        yield from _listed(job, grain, elements(some, tokens), tokens, mine, agent)


def _listed(
    job: Job, grain: Grain, both: tuple[Ints, Ints], tokens: int, mine: Geometries, agent: Agent
) -> Iterator[Post]:
    lists = job.peer.lists(agent, mine, job.kind, grain)
    src, dst = lists.indices(job.names, *both)
    step = _step(tokens * job.row_nbytes)
    for i in range(0, len(src), step):
        some = slice(i, i + step)
        yield ListPost(job.peer, mine, job.kind, grain, src[some], dst[some])


def _addressed(job: Job, mine: Geometries) -> Iterator[Post]:
    ranges = descriptors(job.runs, job.src, job.dst)
    here, there = (
        np.add.outer(np.array([at[name].base for name in job.names], np.int64), begin).ravel()
        for at, begin in ((job.peer.geometries, ranges.src), (mine, ranges.dst))
    )
    nbytes = np.tile(ranges.nbytes, len(job.names))
    step = _step(-(-ranges.total_nbytes // len(ranges)))
    for i in range(0, len(nbytes), step):
        some = slice(i, i + step)
        yield AddressPost(job.peer, mine, here[some], there[some], nbytes[some])


def _step(nbytes: int) -> int:
    """Items of about `nbytes` each that make a request."""
    return max(1, min(POST_ITEMS, POST_NBYTES // nbytes))

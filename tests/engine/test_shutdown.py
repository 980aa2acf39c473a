"""The end of a world of threads, in the middle of a transfer too: prompt, and nothing left over."""

import asyncio
import threading
import time

import pytest
from attrs import define, field
from engine_world import Ranks, collect, config, request, until, world

from kvflow.engine.api import Unavailable
from kvflow.engine.decode.turns import follow
from kvflow.errors import KvflowError
from kvflow.launch import threads


@define(eq=False)
class Gate:
    """Holds every pull before its fourth move until opened."""

    reached: threading.Event = field(factory=threading.Event)
    open: threading.Event = field(factory=threading.Event)

    def __call__(self, num_done):
        if num_done == 3:
            self.reached.set()
            self.open.wait(60)


def _threads(*starts):
    return [t for t in threading.enumerate() if t.name.startswith(starts)]


@pytest.mark.parametrize("changes", [{}, {"decode_dcp": 2}, {"decode_ranks": 2}])
def test_leaving_while_pulls_are_held_ends_every_rank_at_once(changes):
    """A transfer that cannot be stopped writes at most the move it is in, and into memory that it
    keeps alive itself; nobody waits for it."""
    gate = Gate()
    ranks = Ranks(gate)

    async def run():
        async with world(config(**changes), ranks) as deployment:
            tasks = [asyncio.create_task(collect(deployment, request(n, range(20)))) for n in "abc"]
            await until(gate.reached.is_set)
            began = time.monotonic()
        took = time.monotonic() - began
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        return took, ended

    try:
        took, ended = asyncio.run(run())
        assert took < 5
        assert [type(end) for end in ended] == [Unavailable] * 3
        assert not _threads("prefill-", "decode-", "kvflow-pull")
        held = _threads("transfer-")
        assert held
    finally:
        gate.open.set()
    for thread in held:
        thread.join(10)
        assert not thread.is_alive()
    assert not ranks.pulls, "a recalled pull was said to be complete"


def test_a_rank_that_does_not_end_is_named(monkeypatch):
    """All ranks share one deadline."""
    monkeypatch.setattr(threads, "_JOIN_S", 0.2)
    stop = threading.Event()
    bodies = [threads._thread(f"decode-{i}", stop.wait, 10) for i in range(3)]
    began = time.monotonic()
    with pytest.raises(KvflowError, match=r"'decode-0', 'decode-1', 'decode-2'.* within 0.2 s"):
        threads._join(bodies)
    assert time.monotonic() - began < 0.5
    stop.set()
    threads._join(bodies)


def test_a_follower_closes_its_worker_when_its_leader_is_gone():
    class Gone:
        """A comm whose leader will not come."""

        rank, size = 1, 2

        def all_gather(self, rows, counts):
            raise ConnectionError("rank 0 will not come")

    class Endpoint:
        def export(self):
            return b"mine"

    class Worker:
        endpoint, closed = Endpoint(), False

        def close(self):
            self.closed = True

    worker = Worker()
    with pytest.raises(ConnectionError):
        follow(worker, Gone())
    assert worker.closed

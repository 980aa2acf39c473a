"""Porter: what is moved and said while a prefill rank does something else."""

import asyncio
import threading
import time
from contextlib import closing

import pytest
import torch
from test_decode import Gate
from test_prefill import SPEC

from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.engine.messages import (
    Connect,
    Connected,
    Gauges,
    PullRows,
    PushRows,
    RowsPulled,
    RowsPushed,
    RunStep,
    Shutdown,
    Source,
    decode_from_rank,
    encode,
)
from kvflow.engine.moves import Mover
from kvflow.engine.prefill.porter import Porter
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.wire import layout_to_wire
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric

LAYOUT = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(4))
BLOCKS = {"kv": 8}


class Letters:
    """A `Mailbox` whose front is the test."""

    def __init__(self):
        self.changed, self.inbox, self.sent, self.rings = threading.Condition(), [], [], 0

    def receive(self, timeout):
        with self.changed:
            self.changed.wait_for(lambda: self.inbox or self.rings, timeout)
            messages, self.inbox, self.rings = self.inbox, [], 0
        return messages

    def send(self, message):
        with self.changed:
            self.sent.append(decode_from_rank(encode(message)))
            self.changed.notify_all()

    def wake(self):
        with self.changed:
            self.rings += 1
            self.changed.notify_all()

    def tell(self, *messages):
        with self.changed:
            self.inbox += messages
            self.changed.notify_all()

    def wait(self, number):
        """The first messages that were sent."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent) >= number, 20), self.sent
            return list(self.sent)


class Moves:
    """A rank with two neighbours and its porter; nobody receives unless the test does."""

    def __init__(self, gate=None, timeout=20.0):
        fabric = LocalFabric()
        self.caches = [RankCache.allocate(LAYOUT, 0, BLOCKS, fill=i) for i in range(3)]
        self.ends = [
            LocalEndpoint(c, fabric, gate if not i else None) for i, c in enumerate(self.caches)
        ]
        self.box = Letters()
        self.mover = Mover(LAYOUT, 0, BLOCKS, self.ends[0], timeout)
        self.porter = Porter(0, self.mover, self.box)
        for name, end in (("one", self.ends[1]), ("two", self.ends[2])):
            self.box.tell(Connect(name, layout_to_wire(LAYOUT), BLOCKS, {0: end.export()}))
        self.connected = [Connected("one"), Connected("two")]

    def wait(self, number):
        """The first messages that the front hears behind those."""
        sent = self.box.wait(2 + number)
        assert sent[:2] == self.connected
        return sent[2:]

    def holds(self, place, fill, block):
        """Whether a whole block of one cache has these bytes."""
        pages = self.caches[place].pages.values()
        return all(bool(torch.all(v.memory.view(8, -1)[block] == fill)) for v in pages)


def push(name, reader, block):
    return PushRows(name, reader, 0, 4, {"kv": [0]}, {"kv": [block]})


def pull(name, engine, block):
    source = Source(engine, {"kv": [0]}, 0, 4, "")
    return PullRows(name, source, 0, 4, {"kv": [block]})


def test_moves_begin_and_are_answered_while_nobody_receives():
    world = Moves()
    with closing(world.mover), world.porter as porter:
        world.box.tell(RunStep(1, []), push("a", "one", 3), pull("b", "two", 5))
        pushed, pulled = world.wait(2)
        assert (pushed.request_id, pulled.request_id) == ("a", "b")
        assert (type(pushed), type(pulled)) == (RowsPushed, RowsPulled)
        assert pushed.error is pulled.error is None
        assert world.holds(1, 0, 3)
        assert world.holds(0, 2, 5)
        assert porter.receive() == RunStep(1, [])
        porter.send(Gauges({"a": 1.0}))
        assert world.wait(3)[2] == Gauges({"a": 1.0})
        world.box.tell(Shutdown())
        assert porter.receive() == Shutdown()
        porter.send(Gauges({"last": 1.0}))
    assert world.box.sent[5] == Gauges({"last": 1.0})


@pytest.mark.parametrize("move", [push, pull])
def test_a_failed_move_is_answered_when_it_has_ended_and_holds_no_other_up(move):
    gate = Gate(1)
    world = Moves(gate, timeout=0.1)
    with closing(world.mover), world.porter:
        world.box.tell(move("late", "one", 3))
        assert gate.reached.wait(20)
        gate.hold_at = -1
        world.box.tell(push("a", "two", 4), pull("b", "one", 5))
        assert [(m.request_id, m.error) for m in world.wait(2)] == [("a", None), ("b", None)]
        time.sleep(0.05)
        assert len(world.box.sent) == 4  # something of it may still arrive
        gate.open.set()
        late = world.wait(3)[2]
        assert (late.request_id, late.report) == ("late", None)
        assert "did not end" in late.error


def test_what_the_porter_cannot_do_is_raised_at_the_rank():
    world = Moves()
    with closing(world.mover), world.porter as porter:
        world.box.tell(Connect("three", layout_to_wire(LAYOUT), BLOCKS, {0: b"no export"}))
        with pytest.raises(KvflowError):
            porter.receive()


def test_a_rank_that_raises_says_first_what_it_had_to_say():
    world = Moves()

    def serve():
        with closing(world.mover), world.porter as porter:
            porter.send(Gauges({"a": 1.0}))
            raise KvflowError("it fails")

    with pytest.raises(KvflowError, match="it fails"):
        serve()
    assert world.box.sent[-1:] == [Gauges({"a": 1.0})]


def test_a_mailbox_over_a_socket_is_woken_from_other_threads(tmp_path):
    """Also before it listens, and often; what it hears meanwhile is not lost."""

    async def run():
        hub = ZmqHub(f"ipc://{tmp_path}/front")
        with closing(hub), closing(ZmqMailbox("rank", hub.address)) as mailbox:
            mailbox.send(Gauges({}))
            await hub.receive()
            for _ in range(100_000):
                mailbox.wake()
            assert mailbox.receive(None) == []
            began = time.monotonic()
            threading.Timer(0.05, mailbox.wake).start()
            while mailbox.receive(20):
                pass
            assert time.monotonic() - began < 10
            mailbox.wake()
            hub.send("rank", Shutdown())
            heard = []
            while not heard:
                heard = mailbox.receive(20)
            assert heard == [Shutdown()]
            assert mailbox.receive(0.01) == []

    asyncio.run(run())

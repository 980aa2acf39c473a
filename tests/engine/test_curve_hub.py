"""A control plane that crosses a network: only holders of the secret come in, and losses show."""

import asyncio
import contextlib
import select
import socket
import threading

import pytest
import zmq

from kvflow.engine.curve import Curve
from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.engine.messages import Gauges, Shutdown
from kvflow.errors import KvflowError

OURS, THEIRS = Curve(b"a" * 32), Curve(b"b" * 32)


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@contextlib.asynccontextmanager
async def hub_of(curve):
    hub = ZmqHub(free_address(), curve)
    try:
        yield hub
    finally:
        hub.close()


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def hears_nothing(hub, seconds=0.5):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hub.receive(), seconds)


def test_holders_of_the_secret_talk_both_ways():
    async def run():
        async with hub_of(OURS) as hub:
            with contextlib.closing(ZmqMailbox("r0", hub.address, OURS)) as box:
                box.send(Gauges({"x": 1.0}))
                assert await asyncio.wait_for(hub.receive(), 20) == ("r0", Gauges({"x": 1.0}))
                assert hub.is_connected("r0")
                assert box.receive(0.05) == []  # being looked for is not a message
                hub.send("r0", Shutdown())
                assert await asyncio.to_thread(box.receive, None) == [Shutdown()]
            await until(lambda: not hub.is_connected("r0"))

    asyncio.run(run())
    assert "link" not in [thread.name for thread in threading.enumerate()]


def test_another_secret_is_refused_and_knows():
    async def run():
        async with hub_of(OURS) as hub:
            with contextlib.closing(ZmqMailbox("r0", hub.address, THEIRS)) as box:
                box.send(Gauges({}))
                await until(lambda: box.link.num_refused >= 2)
                assert box.link.up_at is None
                await hears_nothing(hub)
                assert not hub.is_connected("r0")

    asyncio.run(run())


def test_the_fronts_key_alone_is_not_enough():
    """A stranger that has learned the front's public key still lacks the ranks' own."""

    async def run():
        async with hub_of(OURS) as hub, contextlib.AsyncExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            stranger = stack.enter_context(context.socket(zmq.DEALER))
            stranger.set(zmq.LINGER, 0)
            stranger.curve_serverkey = OURS._pair("front")[0]
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.connect(hub.address)
            stranger.send(b"let me in")
            await hears_nothing(hub)

    asyncio.run(run())


def test_a_holder_of_the_secret_may_bear_any_name():
    async def run():
        async with hub_of(OURS) as hub, contextlib.AsyncExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            nameless = stack.enter_context(context.socket(zmq.DEALER))
            nameless.set(zmq.IDENTITY, b"\xff\x00")
            OURS.present(nameless)
            nameless.connect(hub.address)
            nameless.send(b"x")
            assert await asyncio.wait_for(hub.receive_bytes(), 20) == ("\\xff\x00", b"x")

    asyncio.run(run())


def test_a_plain_peer_is_not_heard():
    async def run():
        async with hub_of(OURS) as hub:
            with contextlib.closing(ZmqMailbox("r0", hub.address)) as box:
                box._socket.set(zmq.LINGER, 0)
                box.send(Gauges({}))
                await hears_nothing(hub)

    asyncio.run(run())


def test_what_crosses_the_wire_cannot_be_read():
    secret_words = "a prompt that nobody else may see"

    async def run():
        seen = []
        async with hub_of(OURS) as hub:
            with (
                _tap(hub.address, seen) as tapped,
                contextlib.closing(ZmqMailbox("r0", tapped, OURS)) as box,
            ):
                box.send(Gauges({secret_words: 1.0}))
                assert (await asyncio.wait_for(hub.receive(), 20))[1].values == {secret_words: 1.0}
        wire = b"".join(seen)
        assert len(wire) > len(secret_words)
        assert secret_words.encode() not in wire

    asyncio.run(run())


@contextlib.contextmanager
def _tap(address, seen):
    """An address that passes one connection on to another, and keeps a copy of what crosses."""
    host, port = address.removeprefix("tcp://").split(":")

    def relay():
        with server.accept()[0] as here, socket.create_connection((host, int(port))) as there:
            other = {here: there, there: here}
            while True:
                for end in select.select([here, there], [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    seen.append(data)
                    other[end].sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=relay)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_a_rank_sees_its_front_go():
    async def run():
        gone = threading.Event()
        async with hub_of(OURS) as hub:
            box = ZmqMailbox("r0", hub.address, OURS)
            box.link.on_lost = gone.set
            box.send(Gauges({}))
            await asyncio.wait_for(hub.receive(), 20)
        assert await asyncio.to_thread(gone.wait, 20)
        assert box.link.lost
        box._socket.set(zmq.LINGER, 0)
        box.close()

    asyncio.run(run())


def test_an_address_that_cannot_be_listened_at():
    async def run():
        async with hub_of(OURS) as hub:
            with pytest.raises(KvflowError, match=rf"cannot listen at {hub.address}"):
                ZmqHub(hub.address, OURS)

    asyncio.run(run())

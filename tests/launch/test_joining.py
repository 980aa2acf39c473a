"""Ranks of other hosts meet their front: all of them, of one configuration, or none."""

import asyncio
import contextlib
import socket

import pytest
from attrs import evolve
from launch_world import config

from kvflow.engine.curve import Curve
from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.errors import KvflowError, LayoutError
from kvflow.launch import joining
from kvflow.launch.interfaces import address_of, interface_of, interface_towards
from kvflow.launch.joining import facts_of, gather_ranks, join_front

KEY, NAMES, FACTS = Curve(b"k" * 32), ("prefill-0", "prefill-0.1"), {"pcp": "2", "dcp": "1"}


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def hub():
    made = ZmqHub(free_address(), KEY)
    with contextlib.closing(made):
        yield made


async def joins(address, name, *, host="h", facts=FACTS, key=KEY, timeout=30.0):
    """What `join_front` gives a rank; its mailbox stays open until the block of `boxes` ends."""
    box = ZmqMailbox(name, address, key)
    try:
        return await asyncio.to_thread(join_front, box, host, facts, timeout)
    finally:
        await asyncio.to_thread(box.close)


def accept(hosts):
    pass


def test_all_are_welcomed_with_one_key_and_known_by_their_hosts():
    async def run():
        with hub() as front:
            gathered, *keys = await asyncio.gather(
                gather_ranks(front, NAMES, FACTS, 30, accept),
                *(joins(front.address, name, host=f"of-{name}") for name in NAMES),
            )
        assert gathered == {name: f"of-{name}" for name in NAMES}
        assert len(set(keys)) == 1
        assert len(keys[0]) == 32

    asyncio.run(run())


async def outcome(timeout, *others, facts=FACTS, names=NAMES, check=accept):
    """The errors of the front and of the ranks that try to join it."""
    with hub() as front:
        work = gather_ranks(front, names, facts, timeout, check)
        ranks = [other(front.address) for other in others]
        return await asyncio.gather(work, *ranks, return_exceptions=True)


def test_a_missing_rank_is_named_to_the_front_and_to_those_that_wait():
    results = asyncio.run(outcome(1.0, lambda a: joins(a, "prefill-0")))
    assert [type(r) for r in results] == [KvflowError, KvflowError]
    for error in results:
        assert "ranks ['prefill-0.1'] did not join" in str(error)
        assert "in 1.0 s" in str(error)


def test_another_configuration_is_refused_with_both_values_and_the_front_waits_on():
    async def run():
        with hub() as front:
            work = asyncio.ensure_future(gather_ranks(front, NAMES, FACTS, 30, accept))
            with pytest.raises(KvflowError, match=r"'prefill-0\.1'.* pcp 4, at the front 2$"):
                await joins(front.address, "prefill-0.1", facts=FACTS | {"pcp": "4"})
            await asyncio.gather(*(joins(front.address, name) for name in NAMES))
            assert (await work).keys() == set(NAMES)

    asyncio.run(run())


def test_an_unknown_name_is_refused():
    _, error = asyncio.run(outcome(0.6, lambda a: joins(a, "decode-7")))
    assert "the front knows no rank 'decode-7', it waits for ['prefill-0', 'prefill-0.1']" in str(
        error
    )


def test_what_the_check_raises_every_rank_is_told():
    def refuse(hosts):
        raise LayoutError(f"not on {sorted(hosts.values())}")

    results = asyncio.run(
        outcome(30, *(lambda a, n=n: joins(a, n) for n in NAMES), check=refuse),
    )
    assert [str(r) for r in results] == ["not on ['h', 'h']"] * 3


def test_another_key_is_noticed():
    theirs = Curve(b"x" * 32)
    _, error = asyncio.run(outcome(2.0, lambda a: joins(a, "prefill-0", key=theirs)))
    assert str(error).startswith("rank 'prefill-0': the front at tcp://127.0.0.1:")
    assert str(error).endswith("holds another key")


def test_no_front_is_noticed():
    address = free_address()
    with pytest.raises(KvflowError, match=f"the front at {address} cannot be reached"):
        asyncio.run(joins(address, "prefill-0", timeout=1.0))


def test_a_second_rank_of_one_name_is_noticed(monkeypatch):
    monkeypatch.setattr(joining, "_ANSWER_S", 1.0)

    async def run():
        with hub() as front:
            work = asyncio.ensure_future(gather_ranks(front, NAMES, FACTS, 30, accept))
            first = asyncio.ensure_future(joins(front.address, "prefill-0"))
            await asyncio.sleep(1.0)
            with pytest.raises(KvflowError, match="another rank of this name is connected"):
                await joins(front.address, "prefill-0")
            await asyncio.gather(first, joins(front.address, "prefill-0.1"))
            await work

    asyncio.run(run())


def test_a_rank_that_has_left_again_is_missing():
    async def run():
        with hub() as front:
            work = asyncio.ensure_future(gather_ranks(front, NAMES, FACTS, 2.0, accept))
            box = ZmqMailbox("prefill-0.1", front.address, KEY)
            box.send_bytes(joining._encode(joining.Join("prefill-0.1", "h", FACTS)))
            assert await asyncio.to_thread(box.receive_bytes, 5.0)
            await asyncio.to_thread(box.close)
            results = await asyncio.gather(
                work, joins(front.address, "prefill-0"), return_exceptions=True
            )
        assert ["ranks ['prefill-0.1'] did not join" in str(r) for r in results] == [True, True]

    asyncio.run(run())


def test_what_is_no_wish_to_join_ends_the_start():
    async def run():
        with hub() as front, contextlib.closing(ZmqMailbox("prefill-0", front.address, KEY)) as box:
            box.send_bytes(b"\xc1")
            with pytest.raises(KvflowError, match="rank 'prefill-0' sent what is no wish to join"):
                await gather_ranks(front, NAMES, FACTS, 30, accept)

    asyncio.run(run())


# --- facts


def test_facts_tell_every_difference_but_those_of_a_host(tmp_path):
    base = config(pcp=2, dcp=2)
    assert facts_of(base) == facts_of(config(pcp=2, dcp=2))
    assert facts_of(evolve(base, served_model_name="x")) == facts_of(base)
    for changes in ({"interleave": 2}, {"num_drafts": 1}, {"kv_dtype": "fp8"}):
        assert facts_of(evolve(base, **changes)) != facts_of(base)
    changed = facts_of(evolve(base, prefix=evolve(base.prefix, enabled=False)))
    differ = {n for n, v in changed.items() if facts_of(base)[n] != v}
    assert differ == {"prefix.enabled"}


def test_facts_tell_other_weights_but_not_another_place(tmp_path):
    base = config()
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in base.model.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (copy / path.name).write_bytes(path.read_bytes())
    assert facts_of(evolve(base, model=copy)) == facts_of(base)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[100_000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert facts_of(evolve(base, model=copy))["model"] != facts_of(base)["model"]


# --- interfaces


def test_interfaces_by_name_address_and_route():
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"
    with pytest.raises(KvflowError, match=r"interface 'eth77', must be one .* here: \{.*'lo'"):
        address_of("eth77")
    with pytest.raises(KvflowError, match=r"address '192\.0\.2\.77', must be that of an interface"):
        interface_of("192.0.2.77")
    with pytest.raises(KvflowError, match=r"host 'no\.such\.host\.invalid' cannot be reached"):
        interface_towards("no.such.host.invalid")

"""What travels between engines and ranks: round trips, and refusal of everything else."""

import asyncio
import copy
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.engine.api import InvalidRequest, SamplingParams
from kvflow.engine.mailbox import ThreadHub, ZmqHub, ZmqMailbox
from kvflow.engine.messages import (
    Abort,
    Admit,
    AskLoan,
    AskPush,
    AskUnits,
    AttachTier,
    Connect,
    Connected,
    EndLoan,
    ForgetPrefixes,
    FromRank,
    Gauges,
    Generated,
    KVChanged,
    LayersDone,
    Lend,
    Lent,
    Loaned,
    PullRows,
    Pushed,
    PushRows,
    RankFailed,
    Readable,
    Ready,
    RequestFailed,
    RowsPulled,
    RowsPushed,
    RunStep,
    Shutdown,
    Source,
    StepDone,
    StepItem,
    ToRank,
    TransferEnded,
    UnitRows,
    Units,
    UnitsRead,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from kvflow.engine.sampling import Sampled
from kvflow.errors import KvflowError, LayoutError
from kvflow.layouts.wire import layout_from_wire, layout_to_wire
from kvflow.router.events import KVEvents, Stored
from kvflow.testing import layouts, rearranged, specs, token_ranges

names = st.text(max_size=8)
ids = st.lists(st.integers(0, 2**31), max_size=4)
tables = st.dictionaries(names, ids, max_size=2)
numbers = st.dictionaries(names, st.floats(allow_nan=False), max_size=3)
counts = st.dictionaries(names, st.integers(1, 2**40), max_size=2)
sampled = st.builds(
    Sampled,
    st.integers(0, 2**31),
    st.integers(0, 2**40),
    st.none() | st.floats(allow_nan=False),
    st.lists(st.tuples(st.integers(0, 9), st.floats(allow_nan=False)), max_size=2).map(tuple),
)
sampling = st.builds(
    SamplingParams,
    st.integers(1, 2**40),
    st.floats(0, 2),
    st.floats(0.1, 1),
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 99), max_size=2),
    st.booleans(),
    st.none() | st.integers(0, 20),
)
items = st.builds(
    StepItem,
    names,
    st.integers(0, 2**40),
    ids,
    st.none() | st.integers(0, 99),
    tables,
    st.none() | sampling,
)
places = st.integers(0, 2**40)
sources = st.builds(Source, names, tables, places, places, names)
values = st.dictionaries(names, st.integers(0, 2**40) | names | st.lists(names), max_size=3)
exports = st.dictionaries(st.integers(0, 99), st.binary(max_size=9), max_size=2)
salts = st.none() | names
parts = st.lists(names, max_size=2)
token = st.none() | st.integers(0, 2**31)
ended = st.none() | values, st.none() | names
units = st.builds(UnitRows, places, places, ids, st.lists(st.binary(max_size=9)), places)
TO_RANK = {
    RunStep: (places, st.lists(items, max_size=3)),
    AttachTier: (names, places, places),
    Connect: (names, values, counts, exports),
    PullRows: (names, sources, places, places, tables, parts),
    PushRows: (names, names, places, places, tables, tables, parts),
    Admit: (
        *(names, ids, token, sampling, st.none() | sources, places, salts),
        *(names, places, st.booleans()),
    ),
    Readable: (names, places, token, st.none() | st.integers(0, 99)),
    Pushed: (names, *ended),
    Loaned: (names, st.none() | sources),
    Units: (names, names, st.none() | units, places),
    ForgetPrefixes: (),
    Lend: (names, ids, salts),
    EndLoan: (names,),
    Abort: (names,),
    Shutdown: (),
}
to_rank = st.one_of(*(st.builds(kind, *of) for kind, of in TO_RANK.items()))
hashes = st.lists(st.binary(max_size=9), max_size=2)
events = st.builds(
    KVEvents,
    names,
    st.lists(st.builds(Stored, hashes, st.none() | st.binary(max_size=9), places), max_size=2),
    hashes,
    st.booleans(),
    st.none() | places,
)
rank = st.integers(0, 99)
FROM_RANK = {
    Ready: (values, counts, names, exports),
    Connected: (names,),
    StepDone: (rank, rank, st.dictionaries(names, sampled), st.floats(0, 9), parts),
    LayersDone: (places, rank, rank),
    RowsPulled: (names, rank, *ended),
    RowsPushed: (names, rank, *ended),
    AskPush: (names, names, places, places, tables, parts),
    AskLoan: (names, names),
    AskUnits: (names, ids, places, salts),
    UnitsRead: (names,),
    Generated: (names, sampled, st.none() | st.sampled_from(["stop", "length"]), places),
    TransferEnded: (names, names, st.lists(rank), *ended, places),
    RequestFailed: (names, names, ids, salts),
    Lent: (names, tables, places),
    KVChanged: (events,),
    Gauges: (numbers, numbers),
    RankFailed: (names,),
}
from_rank = st.one_of(*(st.builds(kind, *of) for kind, of in FROM_RANK.items()))


def test_every_message_is_tried():
    assert set(TO_RANK) == set(get_args(ToRank))
    assert set(FROM_RANK) == set(get_args(FromRank))


@given(to_rank)
def test_messages_to_ranks_round_trip(message):
    assert decode_to_rank(encode(message)) == message


@given(from_rank)
def test_messages_from_ranks_round_trip(message):
    assert decode_from_rank(encode(message)) == message


@given(st.binary(max_size=40))
def test_garbage_is_refused(data):
    for decode in (decode_to_rank, decode_from_rank):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            decode(data)


@given(to_rank, st.data())
def test_cut_messages_are_refused(message, data):
    blob = encode(message)
    cut = blob[: data.draw(st.integers(0, len(blob) - 1))]
    with pytest.raises(msgspec.DecodeError):
        decode_to_rank(cut)


def test_a_message_for_the_other_side_or_with_wrong_types_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decode_from_rank(encode(Shutdown()))
    with pytest.raises(msgspec.ValidationError):
        decode_to_rank(encode(Gauges({})))
    pack = msgspec.msgpack.encode
    with pytest.raises(msgspec.ValidationError):
        decode_to_rank(pack({"type": "Abort", "request_id": 7}))
    with pytest.raises(msgspec.ValidationError):
        decode_to_rank(pack({"type": "Abort"}))


def test_unlawful_sampling_does_not_arrive():
    source = Source("prefill-0", {}, 0, 3, "d")
    message = Admit("a", [7, 8, 9], 1, SamplingParams(4), source, 3)
    plain = msgspec.msgpack.decode(encode(message))
    plain["sampling"]["temperature"] = -1.0
    with pytest.raises((msgspec.ValidationError, InvalidRequest), match=r"temperature is -1\.0"):
        decode_to_rank(msgspec.msgpack.encode(plain))


# --- hubs


@pytest.mark.parametrize("kind", ["threads", "zmq"])
def test_hubs_deliver_in_order_by_name(kind, tmp_path):
    async def run():
        if kind == "threads":
            hub = ThreadHub()
            boxes = [hub.mailbox(name) for name in "ab"]
        else:
            hub = ZmqHub(f"ipc://{tmp_path}/hub")
            boxes = [ZmqMailbox(name, hub.address) for name in "ab"]
        for i, box in enumerate(boxes):
            box.send(RankFailed(f"hello {i}"))
        first = {name: message.error for name, message in [await hub.receive() for _ in boxes]}
        assert first == {"a": "hello 0", "b": "hello 1"}
        for i in range(5):
            hub.send("b", Abort(str(i)))
        got = []
        while len(got) < 5:
            got += await asyncio.to_thread(boxes[1].receive, 5.0)
        assert [m.request_id for m in got] == list("01234")
        assert boxes[0].receive(0.0) == []
        for box in boxes:
            if kind == "zmq":
                box.close()
        hub.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_rank_that_is_not_there_cannot_be_told(tmp_path):
    async def run():
        hub = ZmqHub(f"ipc://{tmp_path}/hub")
        with pytest.raises(KvflowError, match="'nobody' cannot be reached"):
            hub.send("nobody", Shutdown())
        hub.close()

    asyncio.run(run())


def test_a_name_is_given_once():
    async def run():
        hub = ThreadHub()
        hub.mailbox("a")
        with pytest.raises(KvflowError, match="'a' exists already"):
            hub.mailbox("a")

    asyncio.run(run())


# --- layouts on the wire


@st.composite
def any_layout(draw):
    tokens = draw(token_ranges())
    return draw(layouts(draw(rearranged(draw(specs()))), tokens))


@given(any_layout())
def test_layouts_round_trip_through_msgpack(layout):
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(layout_to_wire(layout)))
    back = layout_from_wire(data)
    assert back == layout
    assert str(back) == str(layout)


@given(any_layout(), st.data())
def test_layouts_with_a_part_missing_or_changed_are_refused(layout, data):
    wire = copy.deepcopy(layout_to_wire(layout))
    key = data.draw(st.sampled_from(sorted(wire)))
    if data.draw(st.booleans()):
        del wire[key]
    else:
        wire[key] = data.draw(st.sampled_from([None, 7, "x", [7], [[None]], {"kind": "Nothing"}]))
    with pytest.raises(LayoutError):
        layout_from_wire(wire)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("form",), 1),
        (("sharding", "kind"), "Exec"),
        (("sharding", "extra"), 1),
        (("groups", 0, "paging", "block_size"), 0),
        (("groups", 0, "paging", "block_size"), "4"),
        (("ranks",), [[0, 0]]),
        (("components", 0, "layer_id"), -1),
        (("components", 0, "fields", 0, 1), "float128"),
        (("components", 0, "arrangement"), "diagonal"),
    ],
)
def test_malformed_layouts_are_refused(path, value):
    from test_prefill import TARGET

    wire = copy.deepcopy(layout_to_wire(TARGET))
    at = wire
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(LayoutError):
        layout_from_wire(wire)

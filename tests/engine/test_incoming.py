"""Incoming: which positions come from where, part by part, also when there are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import SPEC, TARGET

from kvflow.engine.decode.incoming import Incoming
from kvflow.engine.messages import Source
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.transfers.planner import plan_transfer

PROMPT = 32
NAMES = (*SPEC.names, "another")
SHARDED = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2)), Paged(4))


def incoming(*stops, readable=0):
    """Sources that end at these positions; the last one is the engine that computes the prompt."""
    names = [*(f"decode-{i}" for i in range(1, len(stops))), "prefill-0"]
    sources = [Source(name, {}, 0, stop, "") for name, stop in zip(names, stops, strict=True)]
    plans = [plan_transfer(SHARDED, TARGET, (0, stop)) for stop in stops]
    return Incoming(sources, plans, readable, NAMES)


def report(nbytes, **changes):
    counts = {"nbytes": nbytes, "num_descriptors": 1, "num_links": 1, "num_parts": 1}
    rest = {"seconds": 0.5, "strategies": ("direct",), "verified": True}
    return counts | rest | changes


def run(one, num_ranks=1):
    """Carries out every part that can begin, one byte a position and rank; returns them as
    (engine, start, stop), and the sources that ended, by place."""
    parts, ended = [], {}
    while (part := one.next_part(num_ranks)) is not None:
        assert one.next_part(num_ranks) is None  # one at a time
        parts.append((part.source.engine, part.start, part.stop))
        for _ in range(num_ranks):
            one.part_ended(report(part.stop - part.start), None)
        if (end := one.settle()) is not None:
            ended[end[0]] = end[1]
    return parts, ended


@pytest.mark.parametrize("held", [0, 4, 8, 16, 28, 32])
def test_c06_chunks_of_8_behind_what_is_held(held):
    one = incoming(PROMPT)
    one.begin(held)
    parts, ended = [], {}
    for readable in (8, 16, 24, 32):
        assert not one.is_whole
        one.readable = readable
        more, ends = run(one)
        parts, ended = parts + more, ended | ends
        assert one.arrived == max(readable, held)
    wanted = [("prefill-0", max(stop - 8, held), stop) for stop in (8, 16, 24, 32) if stop > held]
    assert parts == (wanted or [("prefill-0", 32, 32)])  # a source is read, if only nothing
    assert one.is_whole
    assert ended[0]["nbytes"] == PROMPT - held
    assert ended[0]["late_nbytes"] == (8 if held < 24 else PROMPT - held)
    assert one.num_held == held
    assert one.unread() == []


def test_c07_nothing_to_move_still_ends_the_source_once_its_prompt_is_computed():
    one = incoming(PROMPT, readable=24)
    one.begin(PROMPT)
    assert not one.can_go_on  # the source is not over: prefill still computes
    one.readable = PROMPT
    assert run(one) == ([("prefill-0", 32, 32)], {0: report(0) | {"late_nbytes": 0}})
    assert one.next_part(1) is None


def test_a_loan_comes_before_the_engine_that_computes():
    one = incoming(24, PROMPT)
    one.begin(4)
    assert run(one)[0] == [("decode-1", 4, 24)]  # it is there, whatever prefill has computed
    assert one.unread() == [1]
    one.readable = 16
    assert run(one)[0] == []  # the loan had these
    one.readable = 30
    assert run(one)[0] == [("prefill-0", 24, 30)]
    one.readable = 32
    assert run(one)[0] == [("prefill-0", 30, 32)]
    assert one.is_whole


@pytest.mark.parametrize("held", [8, 12])
def test_a_loan_of_what_is_held_already_is_read_over_without_a_row(held):
    one = incoming(8, PROMPT, readable=PROMPT)
    one.begin(held)
    parts, ended = run(one)
    assert parts == [("decode-1", held, held), ("prefill-0", held, 32)]
    assert ended[0]["nbytes"] == 0
    assert ended[1]["nbytes"] == 32 - held


def test_rows_of_first_layers_come_ahead_and_only_the_others_behind():
    first, rest = NAMES[:1], NAMES[1:]
    one = incoming(PROMPT, readable=8)
    one.begin(0)
    run(one)
    one.may_begin(16, first)
    ahead = one.next_part(1)
    assert (ahead.start, ahead.stop, ahead.components, ahead.is_ahead) == (8, 16, first, True)
    one.readable = 24  # the step, and the one behind it, are over before this part is
    one.part_ended(report(3), None)
    assert one.settle() is None
    assert one.arrived == 8  # positions count when all their rows are there
    others = one.next_part(1)
    assert (others.start, others.stop, others.components) == (8, 16, rest)
    one.part_ended(report(5), None)
    one.settle()
    whole = one.next_part(1)
    assert (whole.start, whole.stop, whole.components) == (16, 24, ())


def test_word_of_layers_that_comes_late_or_twice_moves_nothing_again():
    one = incoming(PROMPT, readable=16)
    one.begin(0)
    run(one)
    one.may_begin(16, NAMES[:1])
    assert not one.can_go_on  # that step is over
    one.may_begin(24, NAMES[:1])
    assert run(one)[0] == [("prefill-0", 16, 24)]
    one.may_begin(24, NAMES[:1])
    assert not one.can_go_on
    one.readable = 24
    assert [p[1:] for p in run(one)[0]] == [(16, 24)]  # the other components


def test_one_rank_s_failure_is_that_of_the_part_and_nothing_follows():
    one = incoming(PROMPT, readable=8)
    one.begin(0)
    one.next_part(2)
    one.part_ended(None, "it is gone")
    assert one.missing == 1
    one.part_ended(report(8), None)
    assert (one.missing, one.error, one.unread()) == (0, "it is gone", [0])
    one.readable = PROMPT
    assert not one.can_go_on
    assert one.next_part(2) is None


def test_reports_of_ranks_and_parts_are_one():
    """Bytes are the request's, of all ranks and parts; seconds those of the slowest rank in each
    part."""
    one = incoming(PROMPT, readable=8)
    one.begin(0)
    ended = None
    for readable, verified in ((8, True), (32, None)):
        one.readable = readable
        one.next_part(2)
        one.part_ended(report(3, seconds=1.0), None)
        one.part_ended(report(4, seconds=2.0, verified=verified, num_links=3), None)
        ended = one.settle()
    place, whole = ended
    assert place == 0
    assert (whole["nbytes"], whole["num_descriptors"], whole["num_parts"]) == (14, 4, 4)
    assert (whole["seconds"], whole["num_links"]) == (4.0, 4)
    assert whole["verified"] is None  # not every part was
    assert whole["late_nbytes"] == 7


@given(
    st.integers(0, 32),
    st.lists(st.integers(1, 31), max_size=2),
    st.sets(st.integers(1, 31), max_size=4),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.data(),
)
def test_every_position_and_component_comes_once(held, loans, stops, words, data):
    """Steps end at some positions, each after word of none, one or two of three components; parts
    begin and end at any time."""
    one = incoming(*loans, PROMPT)
    one.begin(held)
    seen, part = set(), None
    for stop, num_words in zip([*sorted(stops), PROMPT], words, strict=False):
        for count in range(1, num_words + 2):
            if count <= num_words:
                one.may_begin(stop, NAMES[:count])
            else:
                one.readable = stop
            while data.draw(st.booleans(), "go on") or (one.readable == PROMPT and part):
                if part is not None:
                    one.part_ended(report(0), None)
                    one.settle()
                part = one.next_part(1)
                if part is None:
                    break
                names = part.components or NAMES
                cells = {(t, name) for t in range(part.start, part.stop) for name in names}
                assert not cells & seen
                seen |= cells
                if part.source is one.sources[-1]:
                    assert part.stop <= max(stop if part.is_ahead else one.readable, part.start)
    while part is not None or one.can_go_on:
        if part is not None:
            one.part_ended(report(0), None)
            one.settle()
        part = one.next_part(1)
        if part is not None:
            names = part.components or NAMES
            seen |= {(t, name) for t in range(part.start, part.stop) for name in names}
    assert one.is_whole
    assert seen == {(t, name) for t in range(held, 32) for name in NAMES}

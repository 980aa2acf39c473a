"""What the benchmarks conclude from a step's log, and the program they replay against a link."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve
from raw_world import SPEC, Part, Raw

from kvflow.engine.access import AccessOptions, StepLog
from kvflow.engine.access.order import LayerOrder

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from exposed import (
    LINKS,
    Compute,
    Front,
    Issue,
    Own,
    Step,
    Wait,
    layer_seconds,
    program,
    replay,
)
from timeline import blocked, document, panel, phases, violations

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STEPS = ((Part(0, 0, 30), Part(1, 0, 11)), (Part(0, 30, 40), Part(1, 11, 12)))
ORDER = LayerOrder(SPEC)


def log_of(attention: str, index: str, *, overlap: bool = True) -> StepLog:
    world = Raw(2, 1, 2, options=AccessOptions(attention, index, overlap=overlap))
    world.run(STEPS)
    return world.memories[1].log


def logged(log: StepLog) -> list[tuple[str, str]]:
    """What was issued, waited for and attended, in order of time."""
    events = [(m.at, m.what, m.component) for m in log.moments if m.what == "attended"]
    for f in log.fetches:
        events += [
            (f.times.issued, "issue", f.component),
            (f.times.waited_from, "wait", f.component),
        ]
    return [(what, component) for _, what, component in sorted(events)]


def programmed(**how: object) -> list[tuple[str, str]]:
    layers, events = iter(SPEC.select(part="main", kind="latent")), []
    for event in program(ORDER, **how):
        if isinstance(event, Issue | Wait):
            events.append((type(event).__name__.lower(), event.component))
        elif event == Compute("attention"):
            events.append(("attended", next(layers)))
    return events


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("way", "index"), [("whole", "keys"), ("whole", "queries"), ("union", "keys")]
)
def test_the_program_is_what_a_step_does(way, index, overlap):
    log = log_of(way, index, overlap=overlap)
    assert logged(log) == programmed(way=way, keys=index == "keys", overlap=overlap)


@pytest.mark.parametrize("way", ["whole", "union"])
def test_a_log_with_overlap_keeps_the_rules_and_one_without_breaks_them(way):
    assert violations(log_of(way, "keys"), ORDER, way) == []
    late = violations(log_of(way, "keys", overlap=False), ORDER, way)
    fetched_ahead = {"whole": {1, 2, 3, 4}, "union": {2, 3}}[way]
    wrong = {f"latent.{i}" for i in fetched_ahead} | {"indexer.1", "indexer.4"}
    assert {line.split()[0] for line in late} == wrong


def test_an_early_wait_is_seen():
    log = log_of("whole", "keys")
    first = log.fetches[0]
    log.fetches[0] = evolve(first, times=evolve(first.times, waited_from=log.moments[0].at - 1))
    assert violations(log, ORDER, "whole") == [
        f"{first.component} was waited for before its first use"
    ]


def test_phases_follow_each_other_without_a_gap():
    log = log_of("union", "keys")
    spans = phases(log, ORDER)
    assert all(a.end == b.begin for a, b in pairwise(spans))
    assert [s.layer for s in spans if s.what == "index"] == [0, 1, 4]
    assert [s.layer for s in spans if s.what == "attention"] == [0, 1, 2, 3, 4]


def test_computing_stands_still_for_all_of_a_fetch_without_overlap():
    for overlap in (True, False):
        for f in log_of("whole", "keys", overlap=overlap).fetches:
            begin, end = blocked(f, overlap=overlap)
            assert begin == (f.times.waited_from if overlap else f.times.issued)
            assert end == f.times.waited_until


def test_the_picture_has_a_bar_for_every_phase_fetch_and_wait():
    log = log_of("whole", "keys")
    seconds = log.moments[-1].at - log.moments[0].at
    text = document([panel("a < b", log, ORDER, 900, seconds, overlap=True)], 5, 900)
    bars = [e for e in ET.fromstring(text).iter() if e.tag.endswith("rect")]
    legend = 7
    assert len(bars) == 1 + len(phases(log, ORDER)) + 3 * len(log.fetches) + legend


def test_replay_by_hand():
    """10 bytes a second. b needs 4 s, of which 3 pass while the first part computes, and 1 s of a
    collective of our own stops it; a needed 2 s with nothing beside it."""
    events = [Issue("a"), Wait("a"), Issue("b"), Compute("x"), Front(10), Wait("b"), Compute("x")]
    found = replay(events, {"a": 20, "b": 40}, {"x": 3}, 10)
    assert (found.computing, found.fetches, found.front) == (6, 2 + 1, 1)


def test_fetches_follow_one_another_on_a_link():
    events = [Issue("a"), Issue("b"), Compute("x"), Wait("a"), Wait("b")]
    assert replay(events, {"a": 20, "b": 40}, {"x": 3}, 10).fetches == 3
    assert replay(events[:2] + events[3:], {"a": 20, "b": 40}, {"x": 3}, 10).fetches == 6
    assert replay(events, {"a": 20, "b": 40}, {"x": 60}, 10).fetches == 0
    assert replay([Issue("a"), Issue("b"), Wait("b")], {"a": 20, "b": 40}, {}, 10).fetches == 6


def test_own_collectives_are_made_where_the_step_makes_them():
    events = program(ORDER, "union", keys=False, own=Own(1, 20, 300))
    fronts = [e.nbytes for e in events if isinstance(e, Front)]
    assert fronts == [1, 300, 20, 1, 300, 20, 1, 1, 1, 300, 20]


def test_without_overlap_all_that_is_fetched_is_waited_for():
    """By hand: 7/8 of 65,536 latent rows in 78 layers."""
    step = Step(64, 1 << 16, 8, "whole")
    for bandwidth in LINKS.values():
        alone, beside = (step.run(bandwidth, overlap=o)[0] for o in (False, True))
        assert alone.fetches * bandwidth == pytest.approx(78 * 7 * (1 << 13) * 656)
        assert beside.fetches < alone.fetches
        assert beside.front == alone.front
    # A fast link leaves the first layer's rows, which nothing runs beside.
    fast = step.run(1e15, overlap=True)[0]
    assert fast.fetches * 1e15 == pytest.approx(7 * (1 << 13) * 656)


def test_seconds_of_a_layer():
    """By hand for 8 ranks: 2,048 tokens are bound by operations, 8 by reading weights."""
    many, few = layer_seconds(8192, 1 << 16, 8), layer_seconds(8, 1 << 16, 8)
    sparse = 64 * 2048 * (576 + 512) * 2  # facts: 285 MFLOP a query
    projections = 6144 * (2048 + 576) + 2048 * 64 * 256 + 64 * 512 * (192 + 256)
    projections += 64 * 256 * 6144
    assert many["attention"] == pytest.approx(1024 * (2 * projections + sparse) / 989e12)
    assert few["attention"] == pytest.approx(projections / 4.8e12)
    assert many["index"] == pytest.approx(1024 * 65536 * 32 * 128 * 2 / 989e12)
    assert few["index"] == pytest.approx(65536 * 132 / 4.8e12)
    expert = 3 * 6144 * 2048
    assert many["experts"] == pytest.approx(1024 * 9 * expert * 2 / 989e12)
    assert few["experts"] == pytest.approx((32 * (1 - (31 / 32) ** 8) + 1) * expert / 4.8e12)


@pytest.mark.slow
@pytest.mark.processes
def test_overlap_of_the_trained_model_in_processes(tmp_path):
    """The command itself checks every log; 4 fetches of rows and 2 of keys, 2 ranks, 2 modes."""
    svg = tmp_path / "overlap.svg"
    few = ["--cached", "512", "--new", "16", "--rounds", "1", "--svg", str(svg)]
    command = [sys.executable, str(BENCHMARKS / "overlap.py"), *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "\n24 fetches, each issued and waited for where it should be\n" in done.stdout
    assert svg.read_text().startswith("<svg")

"""What `/metrics` shows of a prefill engine and of a deployment around it."""

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve

from kvflow.engine.api import Metric, Sample
from kvflow.engine.prefill.engine import PrefillEngine
from kvflow.engine.prefix.pool import State

Numbers = Mapping[str, Mapping[str, float]]
"""By rank, then by name."""

_WHOSE = "each prefill rank and each decode engine; a name that ends with no unit counts itself."


def engine_metrics(
    outcomes: Mapping[str, int],
    prefills: Sequence[PrefillEngine],
    gauges: Numbers,
    counters: Numbers,
) -> list[Metric]:
    """Of a whole deployment: requests by outcome, the prefill engines, and every rank's numbers."""
    requests = [Sample(float(n), {"outcome": outcome}) for outcome, n in outcomes.items()]
    return [
        _total("kvflow_engine_requests", "Requests by outcome.", requests),
        *_joined({engine.name: prefill_metrics(engine) for engine in prefills}),
        Metric("kvflow_rank", f"Gauges of {_WHOSE}", "gauge", _by_rank(gauges)),
        Metric("kvflow_rank_total", f"Counters of {_WHOSE}", "counter", _by_rank(counters)),
    ]


def _joined(metrics: Mapping[str, list[Metric]]) -> list[Metric]:
    """Metrics of several engines, which all have the same: their samples bear the engine."""
    return [
        evolve(
            same[0],
            samples=[
                evolve(sample, labels={"engine": name} | dict(sample.labels))
                for name, metric in zip(metrics, same, strict=True)
                for sample in metric.samples
            ],
        )
        for same in zip(*metrics.values(), strict=True)
    ]


def _by_rank(numbers: Numbers) -> list[Sample]:
    return [
        Sample(value, {"rank": rank, "name": name})
        for rank, values in sorted(numbers.items())
        for name, value in sorted(values.items())
    ]


def prefill_metrics(engine: PrefillEngine) -> list[Metric]:
    """Steps, requests, blocks by group and state, reused tokens and units by tier."""
    return [*_of_steps(engine), *_of_prefixes(engine)]


def _of_steps(engine: PrefillEngine) -> list[Metric]:
    states: tuple[State, ...] = ("used", "pinned", "quarantined", "cached")
    blocks = [
        Sample(float(count), {"group": name, "state": state})
        for name, pool in engine.pools.items()
        for state, count in (("free", pool.num_free), *((s, pool.count(s)) for s in states))
    ]
    queue = {"waiting": engine.num_waiting, "running": engine.num_running}
    return [
        _total("kvflow_prefill_steps", "Prefill steps begun.", [Sample(float(engine.num_steps))]),
        _total(
            "kvflow_prefill_model_seconds",
            "Time ranks computed.",
            [Sample(engine.steps.model_seconds)],
        ),
        _total(
            "kvflow_prefill_move_seconds",
            "Time ranks copied, loaded and stored rows of prefixes.",
            [Sample(engine.steps.move_seconds)],
        ),
        _total(
            "kvflow_prefill_schedule_seconds",
            "Time the front decided on steps and took their answers.",
            [Sample(engine.steps.schedule_seconds)],
        ),
        Metric(
            "kvflow_prefill_requests",
            "Requests in the prefill engine.",
            "gauge",
            _by("state", queue.items()),
        ),
        Metric("kvflow_prefill_blocks", "Blocks of the prefill pools.", "gauge", blocks),
    ]


def _of_prefixes(engine: PrefillEngine) -> list[Metric]:
    kv = engine.kv
    events = {"device": {"evicted": kv.cache.num_evicted}}
    units: dict[str, Mapping[str, int]] = {}
    if kv.tiers is not None:
        events |= kv.tiers.events()
        units |= kv.tiers.units()
        events["host"]["load_refused"] = kv.num_refused_loads
    return [
        _total(
            "kvflow_prefix_reused_tokens",
            "Prompt tokens not computed, by the tier their rows came from.",
            _by("tier", kv.num_reused.items()),
        ),
        _total(
            "kvflow_prefix_failed_loans",
            "Prompts whose rows could not be pulled from the engine that lent them.",
            [Sample(float(engine.steps.num_failed_loans))],
        ),
        _total(
            "kvflow_prefix_short_hits",
            "Hits whose last row was made with another token and is computed anew.",
            [Sample(float(kv.num_short_hits))],
        ),
        _total(
            "kvflow_prefix_events",
            "What became of blocks (device) and units (host, disk).",
            _by_two("tier", "event", events),
        ),
        Metric(
            "kvflow_prefix_units", "Units of each tier.", "gauge", _by_two("tier", "state", units)
        ),
    ]


def _total(name: str, text: str, samples: list[Sample]) -> Metric:
    return Metric(name + "_total", text, "counter", samples)


def _by(label: str, counts: Iterable[tuple[str, int]]) -> list[Sample]:
    return [Sample(float(count), {label: name}) for name, count in counts]


def _by_two(outer: str, inner: str, counts: Mapping[str, Mapping[str, int]]) -> list[Sample]:
    return [
        Sample(float(count), {outer: a, inner: b})
        for a, each in counts.items()
        for b, count in each.items()
    ]

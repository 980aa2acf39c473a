"""The server's own metrics and Prometheus' text format, version 0.0.4."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Literal

from attrs import define, field

from kvflow.engine.api import Metric, Sample
from kvflow.errors import KvflowError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["ok", "refused", "overloaded", "error", "aborted"]

_TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@define(eq=False)
class Total:
    """Sums by label values: a counter, or a gauge when it also goes down."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "counter"
    _values: dict[tuple[str, ...], float] = field(factory=dict, init=False)

    def add(self, amount: float, *values: str) -> None:
        """Add to the sum of these label values."""
        self._values[values] = self._values.get(values, 0.0) + amount

    def metric(self) -> Metric:
        """A snapshot; without labels it is there from the start, as 0."""
        values = self._values if self.labels else {(): self._values.get((), 0.0)}
        samples = (
            Sample(value, dict(zip(self.labels, key, strict=True)))
            for key, value in sorted(values.items())
        )
        return Metric(self.name, self.help, self.kind, samples)


@define(eq=False)
class Histogram:
    """Counts of observations at or below each bound, and their sum, in seconds."""

    name: str
    help: str
    bounds: tuple[float, ...]
    _counts: list[int] = field(init=False)
    _sum: float = field(default=0.0, init=False)

    @_counts.default
    def _no_counts(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum += seconds

    def metric(self) -> Metric:
        """A snapshot with cumulative buckets."""
        names = [_number(bound) for bound in self.bounds] + ["+Inf"]
        counts = list(accumulate(self._counts))
        buckets = [
            Sample(count, {"le": name}, "_bucket")
            for name, count in zip(names, counts, strict=True)
        ]
        ends = [Sample(self._sum, suffix="_sum"), Sample(counts[-1], suffix="_count")]
        return Metric(self.name, self.help, "histogram", buckets + ends)


def _requests() -> Total:
    return Total(
        "kvflow_http_requests_total", "Generation calls by outcome.", ("endpoint", "outcome")
    )


@define(eq=False)
class ServerMetrics:
    """What the front itself counts. An engine's metrics must have other names."""

    requests: Total = field(factory=_requests)
    running: Total = field(
        factory=lambda: Total("kvflow_choices_running", "Choices in the engine.", kind="gauge")
    )
    finished: Total = field(
        factory=lambda: Total(
            "kvflow_choices_total", "Choices that ended, by finish reason.", ("finish_reason",)
        )
    )
    prompt_tokens: Total = field(
        factory=lambda: Total("kvflow_prompt_tokens_total", "Prompt tokens of started choices.")
    )
    cached_tokens: Total = field(
        factory=lambda: Total(
            "kvflow_cached_prompt_tokens_total", "Prompt tokens reused from a prefix cache."
        )
    )
    generated_tokens: Total = field(
        factory=lambda: Total("kvflow_generation_tokens_total", "Tokens generated.")
    )
    ttft: Histogram = field(
        factory=lambda: Histogram(
            "kvflow_time_to_first_token_seconds", "From arrival to first token.", _TTFT_BOUNDS
        )
    )
    itl: Histogram = field(
        factory=lambda: Histogram(
            "kvflow_inter_token_latency_seconds", "Between tokens of a choice.", _ITL_BOUNDS
        )
    )

    def snapshot(self) -> list[Metric]:
        """Every family, in a fixed order."""
        totals = [self.requests, self.running, self.finished]
        tokens = [self.prompt_tokens, self.cached_tokens, self.generated_tokens]
        return [total.metric() for total in totals + tokens] + [
            self.ttft.metric(),
            self.itl.metric(),
        ]


def exposition(metrics: Iterable[Metric]) -> str:
    """Prometheus text of all families; raises `KvflowError` when two share a name."""
    lines: list[str] = []
    seen: set[str] = set()
    for metric in metrics:
        if metric.name in seen:
            raise KvflowError(f"two metrics are named {metric.name}, but names must differ")
        seen.add(metric.name)
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += [_line(metric.name, sample) for sample in metric.samples]
    return "\n".join(lines) + "\n"


def _line(name: str, sample: Sample) -> str:
    return f"{name}{sample.suffix}{_labels(sample.labels)} {_number(sample.value)}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = (f'{key}="{_escape(value, quote=True)}"' for key, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(float(value)), text)

"""Measures the constants of the cost model on this machine: NIXL between two processes.

Every constant comes from whole pulls of real endpoints, less the pull of one token in the same
way: what a link costs before its first byte is the same for every way and no part of the model. The
wire's two constants are solved from one payload moved as pages and as rows; those of local copies
from staged rows of two sizes, less the wire; the round trip is what a packed token takes longer
than a direct one.
"""

import contextlib
import multiprocessing as mp
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from attrs import field, frozen

from kvflow.errors import LayoutError, TransferError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.layouts.values import integer
from kvflow.transfers.cost import Costs, Rate, Strategy
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.nixl import NixlEndpoint
from kvflow.transfers.executors.nixl_agent import load_nixl
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.predict import predict, total

NUM_RANKS, BLOCK_SIZE, NUM_LAYERS = 2, 64, 16
_TIMEOUT = 120.0
_BATCHES = 8
_SMALL = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "index_head_dim": 32}


@frozen
class Workload:
    """Tokens dealt to two source ranks, pulled by one target that holds all of them. `small` rows
    have 100 bytes, others are those of GLM-5.3."""

    tokens: int
    interleave: int
    small: bool = False

    def layouts(self) -> tuple[KVLayout, KVLayout]:
        config = dict(GLM_5_3, num_hidden_layers=NUM_LAYERS, **(_SMALL if self.small else {}))
        spec = KVCacheSpec.from_config(config)
        placements = RoundRobin(NUM_RANKS, self.interleave), Replicated()
        src, dst = (
            KVLayout.uniform(spec, Placement.simple(p), Paged(BLOCK_SIZE)) for p in placements
        )
        return src, dst

    def bound(self, tokens: int | None = None) -> BoundPlan:
        """The plan for the first `tokens` (default: all), in random blocks of its pools."""
        rng, bindings = np.random.default_rng(0), []
        for layout in self.layouts():
            num = layout.num_blocks_for(self.tokens)
            tables = {g: rng.permutation(n) for g, n in num.items()}
            bindings.append(Binding.of(layout, tables, num, self.tokens))
        src, dst = bindings
        stop = self.tokens if tokens is None else tokens
        return BoundPlan(plan_transfer(src.layout, dst.layout, (0, stop)), src, dst)


def _serve(pipe: Connection, key: bytes, workloads: list[Workload]) -> None:
    """The source process: an endpoint for each rank of each workload, until told to end."""
    torch.set_num_threads(1)
    endpoints: list[list[NixlEndpoint]] = []
    for workload in workloads:
        layout = workload.layouts()[0]
        num = layout.num_blocks_for(workload.tokens)
        caches = [RankCache.allocate(layout, rank, num, fill=1) for rank in range(NUM_RANKS)]
        endpoints.append([NixlEndpoint(cache, key) for cache in caches])
    pipe.send([[endpoint.export() for endpoint in some] for some in endpoints])
    pipe.recv()
    for endpoint in (e for some in endpoints for e in some):
        endpoint.close()


@frozen(eq=False)
class _Target:
    """The pulling side of a workload."""

    workload: Workload
    key: bytes = field(repr=False)
    exports: list[bytes] = field(repr=False)
    endpoint: NixlEndpoint = field(init=False)
    peers: dict[int, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        layout = self.workload.layouts()[1]
        num = layout.num_blocks_for(self.workload.tokens)
        endpoint = NixlEndpoint(RankCache.allocate(layout, 0, num, fill=1), self.key)
        object.__setattr__(self, "endpoint", endpoint)
        peers = {rank: endpoint.connect(blob) for rank, blob in enumerate(self.exports)}
        object.__setattr__(self, "peers", peers)

    def pull(self, strategy: Strategy, tokens: int | None = None) -> Callable[[], None]:
        bound = self.workload.bound(tokens)

        def run() -> None:
            self.endpoint.pull(bound, 0, self.peers, timeout=_TIMEOUT, strategy=strategy)

        return run

    def items(self, strategy: Strategy, tokens: int | None = None) -> tuple[int, int, int]:
        """Descriptors, bytes on the wire, and pieces of rows that are copied."""
        bound, one = self.workload.bound(tokens), 1e-9

        def counted(wire: Rate, copy: Rate) -> int:
            links = predict(bound, Costs(wire, copy, 0.0))
            return round(total(links)[0][strategy].seconds / one)

        none = Rate(0, 0)
        return (
            counted(Rate(one, 0), none),
            counted(Rate(0, one), none),
            counted(none, Rate(one, 0)),
        )


def measure(tokens: int = 4096, rounds: int = 7) -> Costs:
    """Spawns a source process and pulls from it; some seconds. Every way runs once a round, in
    turn, and the median counts, so that a busy machine slows all of them alike; where it spoils
    so many rounds that the times fit no costs, as many rounds again are added, seven times at most.
    Raises `TransferError` without NIXL, or if all of them fit no costs, and `LayoutError` for fewer
    tokens than two pages or no round."""
    for what, value, low in (("tokens", tokens, 2 * BLOCK_SIZE), ("rounds", rounds, 1)):
        if integer(value, what) < low:
            raise LayoutError(f"{what} is {value}, must be at least {low}")
    load_nixl()  # or both processes would have to say that there is none
    key, context = secrets.token_bytes(32), mp.get_context("spawn")
    workloads = [
        Workload(tokens, BLOCK_SIZE),
        Workload(tokens, 1),
        Workload(tokens * 4, 1, small=True),
    ]
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, key, workloads), daemon=True)
    child.start()
    there.close()  # so that a source that dies is an end of file here
    try:
        return _measured(workloads, key, _exports(here), rounds)
    finally:
        with contextlib.suppress(OSError):
            here.send("end")
        child.join()
        here.close()


def _exports(pipe: Connection) -> list[list[bytes]]:
    try:
        exports: list[list[bytes]] = pipe.recv()
    except EOFError:
        raise TransferError("the source process has ended, what it printed says why") from None
    return exports


def _measured(
    workloads: Sequence[Workload], key: bytes, exports: Sequence[list[bytes]], rounds: int
) -> Costs:
    targets = [_Target(w, key, e) for w, e in zip(workloads, exports, strict=True)]
    pages, rows, small = targets
    ways: dict[str, tuple[_Target, Strategy]] = {
        "pages": (pages, "pages"),
        "rows": (rows, "strided"),
        "large": (rows, "stage"),
        "small": (small, "stage"),
    }
    methods = {name: target.pull(way) for name, (target, way) in ways.items()}
    methods |= {f"{name}, one token": t.pull(way, 1) for name, (t, way) in ways.items()}
    methods["packed, one token"] = rows.pull("pack", 1)

    def fit(medians: dict[str, float]) -> Costs:
        seconds = {name: medians[name] - medians[f"{name}, one token"] for name in ways}
        seconds["trip"] = medians["packed, one token"] - medians["rows, one token"]
        return _solve(seconds, pages, rows, small)

    costs = _fitted(methods, rounds, fit)
    for target in targets:
        target.endpoint.close()
    return costs


def _fitted(
    methods: dict[str, Callable[[], None]], rounds: int, fit: Callable[[dict[str, float]], Costs]
) -> Costs:
    """The costs that the medians of all rounds so far fit, `rounds` or a few times as many. Raises
    what `fit` raises if `_BATCHES` times as many do not."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():  # warms connections and lists
        method()
    while True:
        for _ in range(rounds):
            for name, method in methods.items():
                begin = time.perf_counter()
                method()
                times[name].append(time.perf_counter() - begin)
        try:
            return fit({name: statistics.median(some) for name, some in times.items()})
        except TransferError:
            if min(map(len, times.values())) >= _BATCHES * rounds:
                raise


def _solve(seconds: dict[str, float], pages: _Target, rows: _Target, small: _Target) -> Costs:
    wire = _rate(
        (*pages.items("pages")[:2], seconds["pages"]), (*rows.items("strided")[:2], seconds["rows"])
    )
    equations = []
    for name, target in (("large", rows), ("small", small)):
        descriptors, nbytes, pieces = target.items("stage")
        left = seconds[name] - wire.seconds(descriptors, nbytes)
        equations.append((pieces, target.workload.bound().plan.nbytes, left))
    trips = len(predict(rows.workload.bound(1), Costs()))
    round_trip = max(seconds["trip"], 0.0) / trips
    return Costs(wire, _rate(*equations), round_trip)


def _rate(*measured: tuple[int, int, float]) -> Rate:
    """The rate under which two (items, bytes) take their seconds, as nearly as rates that are not
    negative can. Raises `TransferError` if nothing took any time."""
    seconds = np.array([t for *_, t in measured])
    counts = np.array([some for *some, _ in measured], np.float64)
    rates = [np.linalg.solve(counts, seconds)]
    for column in (0, 1):  # one constant alone, where two would need a negative one
        one = np.zeros(2)
        one[column] = counts[:, column] @ seconds / (counts[:, column] @ counts[:, column])
        rates.append(one)
    lawful = [rate for rate in rates if rate.min() >= 0 and rate.max() > 0]
    if not lawful:
        raise TransferError(f"{measured} (items, bytes, seconds) fit no costs: measure again")
    best = min(lawful, key=lambda rate: float(np.abs(counts @ rate - seconds).sum()))
    return Rate(float(best[0]), float(best[1]))


def as_text(costs: Costs) -> str:
    """The constants, readable."""
    lines = []
    for name, rate, item in (("wire", costs.wire, "descriptor"), ("copy", costs.copy, "row piece")):
        speed = f"{1e-9 / rate.per_byte:.2f} GB/s" if rate.per_byte else "bytes for nothing"
        lines.append(f"{name:10} {rate.per_item * 1e6:8.3f} us a {item:10} {speed}")
    return "\n".join([*lines, f"round trip {costs.round_trip * 1e6:8.0f} us"])

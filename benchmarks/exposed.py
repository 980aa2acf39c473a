"""Bytes that a link leaves exposed: fetches of cached rows against the compute beside them.

    python benchmarks/exposed.py [--ranks P]

A step's program, in the order in which `kvflow.engine.access` issues and awaits fetches (a test
compares it with the log of a step), is run against a link of so many bytes a second and layers
that take so long. Collectives of the computing thread (new rows, positions) go first: what is
fetched in the background stands still meanwhile. Times to start a collective are not modelled.

Layers take what a roofline of one H200 says, which no kernel with bf16 products beats: so a real
step hides more.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve, frozen
from context_gather import PLENTY, counts, shapes, spec_of

from kvflow.engine.access.choice import choose_attention, choose_index
from kvflow.engine.access.order import LayerOrder

FLOPS, MEMORY = 989e12, 4.8e12
"""Of an H200: dense bf16 operations and bytes of memory a second."""

LINKS = {"400 GB/s": 400e9, "50 GB/s": 50e9}
HIDDEN, EXPERT, Q_LORA, HEADS, NOPE, VALUE = 6144, 2048, 2048, 64, 192, 256
LATENT, ROPE, TOPK, EXPERTS, ROUTED = 512, 64, 2048, 256, 8
INDEX_HEADS, INDEX_DIM = 32, 128


@frozen
class Compute:
    """A phase of a layer on the thread that computes."""

    phase: str


@frozen
class Front:
    """A collective that the computing thread makes itself: bytes this rank receives."""

    nbytes: float


@frozen
class Issue:
    component: str


@frozen
class Wait:
    component: str


Event = Compute | Front | Issue | Wait


@frozen
class Own:
    """Bytes that a rank receives in collectives of its computing thread: a layer's new rows, and of
    a choice the exchange of positions and, where index queries move, these and their answers."""

    new: float = 0
    positions: float = 0
    queries: float = 0


def program(
    order: LayerOrder, way: str, *, keys: bool, own: Own = Own(), overlap: bool = True
) -> Iterator[Event]:
    """A step's events, layer after layer. `way` is "whole" or "union"; `keys`: whether index keys
    are fetched."""
    issued: set[str] = set()

    def issue(component: str | None) -> Iterator[Event]:
        if component is not None and component not in issued:
            issued.add(component)
            yield Issue(component)

    for latent in order.spec.select(part="main", kind="latent"):
        indexer, following = order.indexer(latent), order.after(latent)
        yield Front(own.new)
        if indexer:
            if keys:
                yield from issue(indexer)
                yield Wait(indexer)
            else:
                yield Front(own.queries)
            yield Compute("index")
        if overlap and keys:
            yield from issue(order.indexer(following))
        if indexer and way == "union":
            yield Front(own.positions)
        yield from issue(latent)
        if overlap:
            yield from issue(following if way == "whole" else order.sharing(latent))
        yield Wait(latent)
        yield Compute("attention")
        yield Compute("experts")


@frozen
class Exposed:
    """Seconds of one step: computing, standing still for fetches, and for its own collectives."""

    computing: float
    fetches: float
    front: float


def replay(
    events: Iterable[Event],
    fetched: Mapping[str, float],
    seconds: Mapping[str, float],
    bandwidth: float,
) -> Exposed:
    """Runs a program: `fetched` bytes by component, `seconds` by phase. Fetches follow one another
    on the link in the order they are issued."""
    queue: list[tuple[str, float]] = []  # with the seconds still to go
    computing = still = front = 0.0

    def passes(time: float) -> None:
        while queue and time >= queue[0][1]:
            time -= queue.pop(0)[1]
        if queue:
            queue[0] = queue[0][0], queue[0][1] - time

    for event in events:
        if isinstance(event, Compute):
            computing += seconds[event.phase]
            passes(seconds[event.phase])
        elif isinstance(event, Front):
            front += event.nbytes / bandwidth
        elif isinstance(event, Issue):
            queue.append((event.component, fetched[event.component] / bandwidth))
        else:
            while event.component in [name for name, _ in queue]:
                still += queue.pop(0)[1]
    return Exposed(computing, still, front)


def layer_seconds(new: int, cached: int, ranks: int) -> dict[str, float]:
    """The least that phases of a GLM-5.3 layer take on an H200: operations at the dense bf16 rate,
    or reading weights (1 byte each) and keys, whichever is more. `new` tokens of all ranks."""
    tokens = new / ranks
    projections = HIDDEN * (Q_LORA + LATENT + ROPE) + Q_LORA * HEADS * (NOPE + ROPE)
    projections += HEADS * (NOPE * LATENT + LATENT * VALUE) + HEADS * VALUE * HIDDEN
    attended = HEADS * TOPK * (2 * LATENT + ROPE)
    expert = 3 * HIDDEN * EXPERT
    touched = EXPERTS / ranks * (1 - (1 - ROUTED / EXPERTS) ** new) + 1
    scored = cached * INDEX_HEADS * INDEX_DIM
    return {
        "index": max(2 * tokens * scored / FLOPS, cached * (INDEX_DIM + 4) / MEMORY),
        "attention": max(2 * tokens * (projections + attended) / FLOPS, projections / MEMORY),
        "experts": max(2 * tokens * (ROUTED + 1) * expert / FLOPS, touched * expert / MEMORY),
    }


@frozen
class Step:
    """A step of GLM-5.3's 78 layers, one request of `cached` tokens and `new` more."""

    new: int
    cached: int
    ranks: int
    way: str

    @property
    def own(self) -> Own:
        attention, index, num_latents, num_indexers = shapes(78)
        num = counts(self.new, self.cached, self.ranks)
        asked = num.union(TOPK) * num.elsewhere * 4 if self.way == "union" else 0.0
        new = attention.row_nbytes + index.row_nbytes * num_indexers / num_latents
        return Own(
            self.new * (1 - 1 / self.ranks) * new,
            asked / self.ranks,
            index.nbytes("queries", num) / self.ranks,
        )

    def run(self, bandwidth: float, *, overlap: bool) -> tuple[Exposed, float]:
        """What is exposed, and the bytes of the rank's own collectives."""
        num, order = counts(self.new, self.cached, self.ranks), LayerOrder(spec_of("fp8", 78))
        attention, index, _, _ = shapes(78)
        rows_alone = evolve(
            attention, layers_per_choice=math.inf
        )  # its positions are the rank's own
        rows = rows_alone.nbytes(self.way, num) / self.ranks
        fetched = dict.fromkeys(order.spec.select(kind="latent"), rows)
        keys = index.nbytes("keys", num) / self.ranks
        fetched |= dict.fromkeys(order.spec.select(kind="indexer"), keys)
        by_keys = choose_index(index, num, None, PLENTY) == "keys"
        events = [*program(order, self.way, keys=by_keys, own=self.own, overlap=overlap)]
        seconds = layer_seconds(self.new, self.cached, self.ranks)
        front = sum(e.nbytes for e in events if isinstance(e, Front))
        return replay(events, fetched, seconds, bandwidth), front


CASES = ((64, 1 << 16), (64, 1 << 18), (713, 104_000), (2048, 1 << 16), (2048, 1 << 18))


def report(ranks: int = 8) -> None:
    """A table over new and cached tokens, ways and links."""
    print(f"\nP = W = {ranks}, GLM-5.3: MB that a rank waits for in a step, one by one -> overlap")
    head = "".join(f"{link:>32}" for link in LINKS)
    print(f"{'new':>6}{'cached':>8}{'compute ms':>12}{'own MB':>8}{'way':>8}{head}")
    for new, cached in CASES:
        chosen = choose_attention(shapes(78)[0], counts(new, cached, ranks), None, PLENTY)
        for way in ("whole", "union"):
            step, line = Step(new, cached, ranks, way), ""
            for bandwidth in LINKS.values():
                alone, own = step.run(bandwidth, overlap=False)
                beside, _ = step.run(bandwidth, overlap=True)
                before, after = alone.fetches * bandwidth / 1e6, beside.fetches * bandwidth / 1e6
                line += f"{before:12,.0f} -> {after:7,.0f} {after / before:8.3f}"
            name = way + "*" * (way == chosen)
            print(f"{new:6}{cached:8}{alone.computing * 1e3:12.1f}{own / 1e6:8.0f}{name:>8}{line}")
    print(
        "* is what the cost model takes. Own collectives (new rows, positions, index queries) are"
    )
    print("waited for either way; they are not in the other columns.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks is at least 2")
    report(args.ranks)


if __name__ == "__main__":
    main()

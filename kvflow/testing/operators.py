"""The law of every operator, checked on real bytes with any executor and any group.

read(target, t) == read(source, t) for every token, component, head and field that the operator
claims, converted by the one rule of its type where it converts, and no other byte of the target
changes; the source changes nowhere.
"""

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from kvflow.comm import Comm, run_ranks
from kvflow.layouts.layout import Binding
from kvflow.testing.images import Caches, Images
from kvflow.testing.law import SOURCE_FILL, TARGET_FILL, MakeCache, Move, allocate_caches
from kvflow.testing.oracle import Cell, cells, deal, page_cells, tag
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators import HotFetch, Misses, Operator, bind

Content = Callable[[Cell], bytes]
"""What a cell holds: as many bytes as the cell has."""


def check_operator(
    stage: Operator,
    src: Binding,
    dst: Binding,
    tokens: tuple[int, int],
    *,
    run: Move | None = None,
    held: Content = tag,
    wanted: Content = tag,
    make_source: MakeCache = RankCache.allocate,
    make_target: MakeCache = RankCache.allocate,
) -> None:
    """Binds `stage` to `tokens`, runs it on fresh caches and compares every byte of both sides
    with the oracle.

    `run` carries out the bound plan in place of ``stage.execute``: a stage of one rank among
    several needs `on_threads`, or processes of its own. `held` is what the source's cells hold,
    `wanted` what the claimed cells of the target must hold then. Raises `LawError` naming token,
    component, field, head, rank and both bytes; errors of the stage pass through."""
    bound = bind(stage, src, dst, tokens)
    sources = allocate_caches(src.layout, src.num_blocks, SOURCE_FILL, make_source)
    targets = allocate_caches(dst.layout, dst.num_blocks, TARGET_FILL, make_target)
    before, after = Images(sources), Images(targets)
    for cell in cells(src.layout, src, (0, tokens[1]), src.layout.spec.names):
        before.put(cell, held(cell))
    before.write()
    for cell in cells(dst.layout, dst, tokens, tuple(stage.components)):
        after.put(cell, wanted(cell))
    (run or stage.execute)(bound, sources, targets)
    after.compare("target")
    before.compare("source")


def on_threads(make: Callable[[Comm], Operator], size: int) -> Move:
    """Runs a stage on ranks 0..size-1, a thread each that sees its own caches alone. `make` builds
    the stage of one rank."""

    def run(bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        def body(comm: Comm) -> None:
            own = ({r: c for r, c in side.items() if r == comm.rank} for side in (sources, targets))
            make(comm).execute(bound, *own)

        run_ranks(size, body)

    return run


def check_fetch(
    stage: HotFetch,
    rounds: Sequence[Sequence[Misses]],
    num_host_blocks: Mapping[str, int],
    num_hot_blocks: Mapping[str, int],
    *,
    execute: Callable[[Sequence[Misses], RankCache, RankCache], object] | None = None,
) -> None:
    """Runs a `HotFetch` for several rounds on one host pool and one hot buffer a rank, each round a
    call, and compares every byte after each.

    The requests share the pool (their block tables must not overlap) and hold tokens of their own.
    Raises `LawError` as `check_operator` does."""
    requests = list({id(m.request): m.request for each in rounds for m in each}.values())
    hosts = allocate_caches(stage.source, num_host_blocks, SOURCE_FILL)
    hots = allocate_caches(stage.target, num_hot_blocks, TARGET_FILL)
    before, after = Images(hosts), Images(hots)
    held: dict[tuple[int, int, str, str, int, int], bytes] = {}
    for i, request in enumerate(requests):
        everything = (0, max(request.lengths.values(), default=0))
        for cell in cells(stage.source, request, everything, stage.source.spec.names):
            data = tag(evolve(cell, component=f"request {i}, {cell.component}"))
            before.put(cell, data)
            held[i, cell.rank, cell.component, cell.field, cell.head, cell.token] = data
    before.write()
    for each in rounds:
        for miss in each:
            i = next(n for n, request in enumerate(requests) if request is miss.request)
            for cell in _landings(stage, miss):
                key = (i, cell.rank, cell.component, cell.field, cell.head, cell.token)
                after.put(cell, held[key])
        for rank in stage.source.ranks:
            (execute or stage.execute)(each, hosts[rank], hots[rank])
        after.compare("hot buffer of")
        before.compare("host pool of")


def _landings(stage: HotFetch, miss: Misses) -> list[Cell]:
    """The cells of the hot buffer that a miss claims, slots counted one by one."""
    found = []
    sharding = stage.target.placement.sharding
    hands = deal(sharding, int(max(miss.positions, default=-1)) + 1)
    for name in stage.components:
        record, size = stage.target.spec[name].record, stage.target.group_of(name).paging.block_size
        page = page_cells(record, size)
        places, block, offset = {}, 0, 0
        for slot in range(int(max(miss.slots.ids, default=-1)) + 1):
            places[slot] = block, offset
            block, offset = (block, offset + 1) if offset + 1 < size else (block + 1, 0)
        for position, slot in zip(miss.positions.tolist(), miss.slots.ids.tolist(), strict=True):
            for hand, ranks in zip(hands, stage.target.placement.ranks, strict=True):
                if position in hand:
                    block, offset = places[slot]
                    found += [
                        Cell(rank, name, field, head, position, block, at)
                        for rank in ranks
                        for (t, field, head), at in page.items()
                        if t == offset
                    ]
    return found

"""A rank alone over pages: it waits for nothing, gives the bits of a plain cache, and chooses for
a batch of requests at once what it chooses for each by itself."""

import pytest
import torch
from flat_kv import FlatKV
from glm_fixture import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from no_waiting import no_waiting

from kvflow.comm import LocalComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.memory import StepRequest
from kvflow.errors import LayoutError
from kvflow.kernels.codec import encode_index_key
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import index_record
from kvflow.layouts.sharding import Replicated
from kvflow.models import Glm, IndexQueries, Segment
from kvflow.models.reading import topk_by_reading
from kvflow.models.together import Together
from kvflow.transfers.executors.base import RankCache

DTYPES = {"float32": torch.float32, "float64": torch.float64, "fp8": torch.float32}
STEPS = [[(0, 0, 100), (1, 0, 3), (2, 0, 20)], [(0, 100, 1), (1, 3, 1)], [(0, 101, 4), (2, 20, 4)]]
EVERYWHERE = Placement.simple(Replicated())


def requests(chunks, tables) -> list[StepRequest]:
    one = Placement.simple(Replicated())
    return [StepRequest(str(r), at, at + num, one, tables[r]) for r, at, num in chunks]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_pages_of_a_rank_alone(kv_dtype: str) -> None:
    glm, comm = Glm.load(TINY, kv_dtype=kv_dtype, dtype=DTYPES[kv_dtype]), LocalComm()
    layout = KVLayout.uniform(glm.spec, EVERYWHERE, Paged(16))
    (group,) = layout.groups
    memory = PagedMemory(layout, RankCache.allocate(layout, 0, {group.name: 30}), comm)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [{group.name: order[r * 10 : r * 10 + 10]} for r in range(3)]
    plain = FlatKV(glm.spec, 3, 160)
    generator = torch.Generator().manual_seed(4)
    for chunks in STEPS:
        total = sum(num for _, _, num in chunks)
        tokens = torch.randint(0, 320, (total,), generator=generator)
        places = [torch.arange(at, at + num) for _, at, num in chunks]
        stops = [at + num for _, at, num in chunks]
        mine = [Segment(i, p, stop) for i, (p, stop) in enumerate(zip(places, stops, strict=True))]
        theirs = [
            Segment(r, p, stop) for (r, _, _), p, stop in zip(chunks, places, stops, strict=True)
        ]
        plain.begin(theirs)
        want = glm.forward(tokens, theirs, plain, comm)
        kv = memory.open(requests(chunks, tables), frozenset())
        if total > 64:
            got = glm.forward(tokens, mine, kv, comm)
        else:
            with no_waiting():
                got = glm.forward(tokens, mine, kv, comm)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0, 1], [2, 3]], None),
        ([[0, 1], [2, 1]], "share a slot"),
        ([[0, 1], [2, 4]], r"reach from 0 to 71, must be 0 <= slot < 64"),
    ],
)
def test_tables_are_checked_when_a_step_is_opened(tables, message) -> None:
    spec = Glm.load(TINY, kv_dtype="fp8").spec
    layout = KVLayout.uniform(spec, EVERYWHERE, Paged(16))
    (group,) = layout.groups
    memory = PagedMemory(layout, RankCache.allocate(layout, 0, {group.name: 4}), LocalComm())
    step = requests([(0, 20, 4), (1, 20, 4)], [{group.name: table} for table in tables])
    if message is None:
        memory.open(step, frozenset())
        return
    with pytest.raises(LayoutError, match=message):
        memory.open(step, frozenset())


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 5, 12, 13, 240, 241, 500, 730]), min_size=1, max_size=4),
    num_new=st.integers(1, 8),
    heads=st.sampled_from([4, 16]),
    seed=st.integers(0, 99),
)
def test_a_batch_chooses_as_each_alone(lengths, num_new, heads, seed) -> None:
    record, generator = index_record("float32", index_dim=32), torch.Generator().manual_seed(seed)
    keys = [
        encode_index_key(record, torch.randn(n, 32, generator=generator).round(decimals=1))
        for n in lengths
    ]
    parts = [Segment(i, torch.arange(max(0, n - num_new), n), n) for i, n in enumerate(lengths)]
    total = sum(map(len, parts))
    asked = IndexQueries(
        torch.randn(total, heads, 32, generator=generator),
        torch.randn(total, heads, generator=generator),
        12,
    )

    def read(i: int, positions: torch.Tensor | None) -> torch.Tensor:
        return keys[i] if positions is None else keys[i].index_select(0, positions)

    want = topk_by_reading(record, read, asked, parts)
    plan = Together.of(parts, 12)
    rows = [read(f.request_idx, f.positions) for f in plan.fetches]
    fetched = torch.cat(rows).view(torch.float32) if rows else torch.empty(0, 32)
    got = plan.choose(fetched, asked)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)

"""The catalogue against its sources: every byte, golden numbers, and moves between its entries."""

import catalogue_formulas as formulas
import numpy as np
import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.catalogue import CATALOGUE, FAMILIES, Entry, Shape, entry, names
from kvflow.layouts.memory import MemoryOrder
from kvflow.layouts.paging import bytes_of_slots

SMALL = Shape(
    num_layers=formulas.L,
    num_blocks=formulas.NB,
    block_size=formulas.N,
    num_kv_heads=formulas.H,
    head_dim=formulas.D,
    chunk_blocks=formulas.C,
    num_workers=formulas.W,
    worker=formulas.ME,
)


def kinds_of(order: MemoryOrder) -> list[str]:
    return list(dict.fromkeys(c.kind for c in order.layout.spec.components))


# --- every byte lies where the source says --------------------------------------------------------


def bytes_of(order: MemoryOrder, component: str) -> np.ndarray:
    """int64 [blocks, tokens of a block, bytes of a row]: where the catalogue says they lie."""
    pages, record = order.pages_of(component), order.record(component)
    size = order.block_size(component)
    slots = np.arange(pages.num_blocks * size)
    at = np.full((len(slots), record.nbytes), -1, np.int64)
    for piece in record.pieces(size):
        begins = pages.base + bytes_of_slots(slots, size, pages.block_stride, piece)
        stop = piece.record_offset + piece.nbytes
        at[:, piece.record_offset : stop] = begins[:, None] + np.arange(piece.nbytes)
    return at.reshape(pages.num_blocks, size, record.nbytes)


def check_bytes(order: MemoryOrder, component: str, regions: dict, said) -> None:
    """Compares every byte with `said(blocks, tokens, byte of the row)` -> (region, bytes)."""
    at = bytes_of(order, component)
    region = order.pages_of(component).region
    b, t = (np.arange(n) for n in at.shape[:2])
    for o in range(at.shape[2]):
        where, byte = said(b[:, None], t[None, :], o)
        assert np.array_equal(at[:, :, o], byte), (component, o)
    assert regions.setdefault(where, region) == region, component


@pytest.mark.parametrize("name", formulas.GQA)
def test_every_byte_of_keys_and_values(name):
    order, item = entry(name).order(SMALL), 2
    regions: dict = {}
    for layer in range(formulas.L):
        for v, kind in enumerate(("key", "value")):

            def said(b, t, o, layer=layer, v=v):
                head, rest = divmod(o, formulas.D * item)
                element, byte = divmod(rest, item)
                region, at = formulas.GQA[name](layer, v, b, t, head, element)
                return region, at * item + byte

            check_bytes(order, f"{kind}.{layer}", regions, said)
    assert len(regions) == len(order.regions) == len(set(regions.values()))


@pytest.mark.parametrize("name", formulas.LATENT)
def test_every_byte_of_latent_rows(name):
    order, (row, formula) = entry(name).order(SMALL), formulas.LATENT[name]
    regions: dict = {}
    for layer in range(formulas.L):
        assert order.record(f"latent.{layer}").nbytes == row

        def said(b, t, o, layer=layer):
            return formula(layer, b, t, o)

        check_bytes(order, f"latent.{layer}", regions, said)
    assert len(regions) == len(order.regions) == len(set(regions.values()))


@pytest.mark.parametrize("name", formulas.INDEX)
def test_every_byte_of_indexer_keys(name):
    order, formula = entry(name).order(SMALL), formulas.INDEX[name]
    regions: dict = {}
    for layer in range(formulas.L):

        def said(b, t, o, layer=layer):
            return formula(layer, b, t, o)

        check_bytes(order, f"indexer.{layer}", regions, said)
    assert len(regions) == len(order.regions) == len(set(regions.values()))


def test_every_entry_has_a_formula():
    known = {*formulas.GQA, *formulas.LATENT, *formulas.INDEX, *formulas.HIDDEN}
    assert known == set(names())


# --- entries with blocks of their own -------------------------------------------------------------

MIXED = Shape(num_layers=7, num_blocks=5, block_size=64, full_layers=(0, 1, 2, 6))


def test_host_rows_are_the_rows_of_host_pages():
    pages, rows = (entry(f"vllm.hisparse_host{n}").order(MIXED) for n in ("", "_rows"))
    assert rows.pages_of("latent.3").num_blocks == 5 * 64
    for component in pages.layout.spec.names:
        whole = bytes_of(pages, component)
        assert np.array_equal(bytes_of(rows, component), whole.reshape(-1, 1, 656))


def test_the_host_pool_keeps_owners_of_an_indexer_first():
    order = entry("vllm.hisparse_host").order(MIXED)
    begins = {c: order.pages_of(c).base for c in order.layout.spec.names}
    assert sorted(begins, key=begins.__getitem__) == [
        f"latent.{layer}" for layer in (0, 1, 2, 6, 3, 4, 5)
    ]


def test_the_device_pool_overlays_its_groups():
    """4 indexer pages of 8,448 bytes leave no room for a latent page of 41,984: a unit a group."""
    order = entry("vllm.hisparse_device").order(MIXED)
    assert {g.name: g.components for g in order.layout.groups} == {
        "indexer": tuple(f"indexer.{layer}" for layer in (0, 1, 2, 6)),
        "resident.0": ("latent.0",),
        "resident.1": ("latent.1",),
        "resident.2": ("latent.2", "latent.3", "latent.4", "latent.5"),
        "resident.3": ("latent.6",),
    }
    stride = 4 * 41_984
    assert order.nbytes == 5 * stride
    begins = {c: order.pages_of(c).begin(1) - stride for c in order.layout.spec.names}
    assert begins["indexer.6"] == 3 * 8_448
    assert [begins[f"latent.{layer}"] for layer in range(7)] == [
        0, 0, 0, 41_984, 2 * 41_984, 3 * 41_984, 0,
    ]  # fmt: skip


# --- golden numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("e", CATALOGUE, ids=names())
def test_golden_numbers(e: Entry):
    order, golden = e.order(e.golden.shape), e.golden
    kinds = ["key", "value"] if "key" in kinds_of(order) else kinds_of(order)[:1]
    first, second = (order.pages_of(f"{kinds[0]}.{layer}") for layer in (0, 1))
    apart = first.region != second.region
    page = sum(order.record(f"{k}.0").page_nbytes(order.block_size(f"{k}.0")) for k in kinds)
    assert (
        order.layout.spec.nbytes_per_token,
        page,
        None if apart else second.base - first.base,
        first.block_stride,
        order.nbytes,
    ) == (
        golden.nbytes_per_token,
        golden.page_nbytes,
        golden.layer_stride,
        golden.block_stride,
        golden.nbytes,
    )


@pytest.mark.parametrize("e", CATALOGUE, ids=names())
def test_tokens_pages_and_bytes_agree(e: Entry):
    """F06: blocks x tokens of a block is the capacity, and its bytes fit the memory exactly but for
    what is rounded up."""
    order = e.order(e.golden.shape)
    held = 0
    for pages in order.pages:
        size = order.block_size(pages.component)
        held += pages.num_blocks * size * order.record(pages.component).nbytes
    if order.overlaid:
        assert held > order.nbytes
    else:
        assert held <= order.nbytes
        rounded = e.block_multiple > 1 or e.family == "dsv4"
        assert (held == order.nbytes) != rounded or e.golden.nbytes == held


# --- lookups --------------------------------------------------------------------------------------


def test_names_are_unique_and_say_the_project():
    assert len(set(names())) == len(names()) == len(CATALOGUE)
    projects = {"vllm": {"vLLM", "LMCache"}, "sglang": {"SGLang"}, "trtllm": {"TensorRT-LLM"},
                "dynamo": {"Dynamo KVBM"}, "lmcache": {"LMCache"}}  # fmt: skip
    for e in CATALOGUE:
        assert e.source.project in projects[e.name.split(".")[0]]
        assert all((e.source.version, e.source.where, e.source.says))
        assert e.custom or e.family in FAMILIES


def test_an_unknown_name_is_refused():
    with pytest.raises(LayoutError, match=r"no layout 'vllm\.nhd' in the catalogue"):
        entry("vllm.nhd")


def test_a_worker_beyond_the_workers_is_refused():
    with pytest.raises(LayoutError, match="worker 2, must be below 2 workers"):
        Shape(num_workers=2, worker=2)


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("vllm.cpu_amx", Shape(block_size=24), "24 steps of 't' in tiles of 16"),
        ("sglang.mha_vectorized", Shape(head_dim=12), "12 steps of 'e' in tiles of 8"),
        ("vllm.indexer_shuffled", Shape(block_size=8), "tiles of 16 do not divide the 8 steps"),
        ("vllm.nvfp4_ds_mla", Shape(latent_rank=40), "latent_rank 40, must be a multiple of 16"),
    ],
)
def test_shapes_that_a_layout_cannot_have_are_refused(name, shape, complaint):
    with pytest.raises(LayoutError, match=complaint):
        entry(name).order(shape)

"""NVIDIA Dynamo: the block layouts of its KV block manager (KVBM).

The engine's layers keep their own allocations or a block of all layers is contiguous; the outer
axis is K and V, 1 for MLA. Alignments other than 1 are not described here.
"""

from kvflow.layouts.catalogue.entry import Entry, Golden, Shape, Source
from kvflow.layouts.catalogue.vllm import GLM, LLAMA

KVBM = Shape(num_layers=5, num_blocks=7, block_size=4, num_kv_heads=1, head_dim=13, dtype="float32")
"""The shape of the unit tests beside the source: 5 layers, 7 blocks, 4 tokens, 13 floats."""


def _layout(says: str) -> Source:
    where = "lib/llm/src/block_manager/layout.rs, commit 28293432"
    return Source("Dynamo KVBM", "main, 2026", where, says)


def _physical(says: str) -> Source:
    where = "lib/kvbm-physical/src/layout/kv_block_layout.rs, commit 090512fc"
    return Source("Dynamo KVBM", "main, 2026", where, says)


ENTRIES = (
    Entry(
        "dynamo.layer_separate_outer",
        "gqa",
        "L | v B t h e",
        _layout(
            "LayerSeparate with outer_contiguous: each layer a storage [outer, blocks, page, "
            "inner], the outer stride is the block stride times the blocks",
        ),
        Golden(KVBM, 520, 416, None, 208, 14_560),
        note="taken for block-contiguous it has the same size and swaps K with V: the source warns",
    ),
    Entry(
        "dynamo.layer_separate_block",
        "gqa",
        "L | B v t h e",
        _layout(
            "LayerSeparate without outer_contiguous: each layer a storage [blocks, outer, page, "
            "inner]",
        ),
        Golden(KVBM, 520, 416, None, 416, 14_560),
    ),
    Entry(
        "dynamo.fully_contiguous",
        "gqa",
        "B L v t h e",
        _layout(
            "FullyContiguous: one storage [blocks, L, outer, page, inner], the layer stride is "
            "outer regions of page * inner elements",
        ),
        Golden(KVBM, 520, 416, 416, 2_080, 14_560),
        note="OperationalNHD of kvbm-physical",
    ),
    Entry(
        "dynamo.operational_hnd",
        "gqa",
        "B L v h t e",
        _physical("OperationalHND: [nl, no, nh, nt, hd] inside a contiguous block"),
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
    ),
    Entry(
        "dynamo.universal_tp",
        "gqa",
        "B h L v t e",
        _physical("UniversalTP: [nh, nl, no, nt, hd], heads outermost so that TP can slice them"),
        Golden(LLAMA, 131_072, 65_536, 8_192, 2_097_152, 2_097_152_000),
    ),
    Entry(
        "dynamo.universal_pp",
        "gqa",
        "B L h v t e",
        _physical("UniversalPP: [nl, nh, no, nt, hd], layers outermost for pipelines"),
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
    ),
    Entry(
        "dynamo.mla_fully_contiguous",
        "mla_bf16",
        "B L t f e",
        _layout("FullyContiguous with an outer axis of 1, as for MLA"),
        Golden(GLM, 91_008, 73_728, 73_728, 5_824_512, 5_824_512_000),
    ),
)

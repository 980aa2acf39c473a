"""LMCache: chunks of tokens in host memory.

A memory object holds a chunk (256 tokens by default) of one request. The entries are for full
chunks behind each other in one slab; a shorter last chunk is dense in its own number of tokens,
which is a block of that size.
"""

from attrs import evolve

from kvflow.layouts.catalogue.entry import Entry, Golden, Source
from kvflow.layouts.catalogue.vllm import GLM, LLAMA

FORMATS = "lmcache/v1/memory_management.py (MemoryFormat)"
CONNECTORS = "lmcache/v1/gpu_connector/gpu_connectors.py (get_shape)"
LLAMA_CHUNK = evolve(LLAMA, num_blocks=100, block_size=256)
GLM_CHUNK = evolve(GLM, num_blocks=100, block_size=256)


def _wheel(says: str) -> Source:
    return Source("LMCache", "0.5.6", f"{FORMATS}; {CONNECTORS}", says)


ENTRIES = (
    Entry(
        "lmcache.kv_2ltd",
        "gqa",
        "B v L t h e",
        _wheel("KV_2LTD: a chunk is [2, L, T, H*D], K of all layers before V of all layers"),
        Golden(LLAMA_CHUNK, 131_072, 1_048_576, 524_288, 33_554_432, 3_355_443_200),
    ),
    Entry(
        "lmcache.kv_t2d",
        "gqa",
        "L | B t v h e",
        _wheel("KV_T2D: each layer of a chunk is an object [T, 2, H*D]"),
        Golden(LLAMA_CHUNK, 131_072, 1_048_576, None, 1_048_576, 3_355_443_200),
        note="layerwise without blending. MemoryFormat.token_dim() says 1 for it, its shape says 0",
    ),
    Entry(
        "lmcache.kv_2td",
        "gqa",
        "L | B v t h e",
        _wheel("KV_2TD: each layer of a chunk is an object [2, T, H*D]"),
        Golden(LLAMA_CHUNK, 131_072, 1_048_576, None, 1_048_576, 3_355_443_200),
        note="layerwise with blending. MemoryFormat.token_dim() says 0 for it, its shape says 1",
    ),
    Entry(
        "lmcache.kv_mla",
        "mla_bf16",
        "B L t f e",
        _wheel("KV_MLA_FMT: a chunk is [1, L, T, R + dr]"),
        Golden(GLM_CHUNK, 91_008, 294_912, 294_912, 23_298_048, 2_329_804_800),
    ),
)

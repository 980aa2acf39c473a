"""SGLang: token pools of a device, and the host pools of HiCache.

A device pool counts tokens; its first page absorbs writes of padding and counts as a block here.
HiCache's host pools take their order from ``--hicache-mem-layout``.
"""

from kvflow.layouts.catalogue.entry import Entry, Golden, Source, planes
from kvflow.layouts.catalogue.vllm import GLM, LLAMA

POOL = "sglang/srt/mem_cache/memory_pool.py"
HOST_MHA = "sglang/srt/mem_cache/pool_host/mha.py (MHATokenToKVPoolHost.init_kv_buffer)"
HOST_MLA = "sglang/srt/mem_cache/pool_host/mla.py (MLATokenToKVPoolHost.init_kv_buffer)"
HOST_DSA = "sglang/srt/mem_cache/pool_host/dsa.py (DSAIndexerPoolHost.init_kv_buffer)"
TOKEN_MAJOR = "sglang/srt/mem_cache/layout/token_major.py, unified_memory_pool.py"


def _wheel(where: str, says: str) -> Source:
    return Source("SGLang", "0.5.23", where, says)


DEVICE = (
    Entry(
        "sglang.mha_nhd",
        "gqa",
        "L | v B t h e",
        _wheel(
            POOL + " (MHATokenToKVPool._create_buffers_normal)",
            "each layer is one allocation [2, tokens, H, D] with tokens rounded up to whole pages",
        ),
        Golden(LLAMA, 131_072, 65_536, None, 32_768, 2_097_152_000),
        note="K and V apart; where their head sizes differ they are two allocations",
    ),
    Entry(
        "sglang.mha_hnd",
        "gqa",
        "L | v B h t e",
        _wheel(
            POOL + " (MHATokenToKVPool._kv_buffer_shapes)",
            "with SGLANG_USE_HND_KVCACHE each layer is one allocation [2, pages, H, P, D]",
        ),
        Golden(LLAMA, 131_072, 65_536, None, 32_768, 2_097_152_000),
    ),
    Entry(
        "sglang.mha_vectorized",
        "gqa",
        "L v | B h e t e8",
        _wheel(
            POOL + " (MHATokenToKVPool._create_buffers_normal, vectorized_5d)",
            "K is [pages, H, D/X, P, X] and V is [pages, H, P/X, D, X], allocations of their own; "
            "X elements are 16 bytes, 8 of bf16",
        ),
        Golden(LLAMA, 131_072, 65_536, None, 32_768, 2_097_152_000),
        value_axes="L v | B h t e t8",
        note="for ROCm's AITER kernels",
    ),
    Entry(
        "sglang.mha_token_major",
        "gqa",
        "B t L v h e",
        _wheel(
            TOKEN_MAJOR,
            "a token's entry holds K_0, V_0, K_1, V_1, ... of all layers; an entry is rounded up "
            "to 32 bytes, each row is a multiple of 16",
        ),
        Golden(LLAMA, 131_072, 65_536, 4_096, 2_097_152, 2_097_152_000),
        note="the unified pool; for shapes whose entries need no rounding",
    ),
    Entry(
        "sglang.mla_bf16",
        "mla_bf16",
        "L | B t f e",
        _wheel(
            POOL + " (MLATokenToKVPool._create_buffers)",
            "each layer is an allocation [tokens, 1, R + dr]",
        ),
        Golden(GLM, 91_008, 73_728, None, 73_728, 5_824_512_000),
    ),
    Entry(
        "sglang.mla_token_major",
        "mla_bf16",
        "B t L f e",
        _wheel(TOKEN_MAJOR, "a token's entry holds the latent rows of all layers"),
        Golden(GLM, 91_008, 73_728, 1_152, 5_824_512, 5_824_512_000),
        note="the unified pool; for shapes whose entries need no rounding",
    ),
    Entry(
        "sglang.dsa_fp8",
        "mla_fp8",
        "L | B t f e",
        _wheel(
            "sglang/srt/mem_cache/kv_cache_configurator.py (calculate_mla_kv_cache_dim), "
            "sglang/kernels/ops/quantization/dsa_quant_k_cache.py",
            "a row is R e4m3 values, a float32 scale for each 128 of them, dr bf16 values",
        ),
        Golden(GLM, 51_824, 41_984, None, 41_984, 3_316_736_000),
    ),
    Entry(
        "sglang.dsa_indexer",
        "index_fp8",
        "L | B page",
        _wheel(
            "sglang/srt/mem_cache/index_key_cache.py, sglang/kernels/ops/kvcache/"
            "dsa_index_k_cache.py",
            "each layer that computes its own top-k is an allocation [pages, P*(128 + 4)]: all key "
            "bytes of a page, then all scale bytes",
        ),
        Golden(GLM, 2_904, 8_448, None, 8_448, 185_856_000),
        page=planes(("key", "t e"), ("scale", "t e")),
        note="layers that share a top-k own no rows",
    ),
    Entry(
        "sglang.dsa_indexer_preshuffled",
        "index_fp8",
        "L | B page",
        _wheel(
            "sglang/kernels/ops/kvcache/dsa_index_k_cache.py (PRESHUFFLE_TILE)",
            "key bytes in tiles of 16 tokens by 16 bytes, tiles of a row of tokens in order of "
            "columns; scales as in the plain page",
        ),
        Golden(GLM, 2_904, 8_448, None, 8_448, 185_856_000),
        page=planes(("key", "t e t16 e16"), ("scale", "t e")),
        note="for ROCm",
    ),
)

HICACHE = (
    Entry(
        "sglang.hicache_layer_first",
        "gqa",
        "v L B t h e",
        _wheel(HOST_MHA, "layer_first is [2, L, tokens, H, D]"),
        Golden(LLAMA, 131_072, 65_536, 32_768_000, 32_768, 2_097_152_000),
    ),
    Entry(
        "sglang.hicache_page_first",
        "gqa",
        "v B t L h e",
        _wheel(HOST_MHA, "page_first is [2, tokens, L, H, D]"),
        Golden(LLAMA, 131_072, 65_536, 2_048, 1_048_576, 2_097_152_000),
    ),
    Entry(
        "sglang.hicache_page_first_direct",
        "gqa",
        "v B L t h e",
        _wheel(HOST_MHA, "page_first_direct is [2, pages, L, P, H, D]"),
        Golden(LLAMA, 131_072, 65_536, 32_768, 1_048_576, 2_097_152_000),
    ),
    Entry(
        "sglang.hicache_page_head",
        "gqa",
        "v B h t L e",
        _wheel(HOST_MHA, "page_head is [2, pages, H, P, L, D]"),
        Golden(LLAMA, 131_072, 65_536, 256, 1_048_576, 2_097_152_000),
    ),
    Entry(
        "sglang.hicache_page_unified",
        "gqa",
        "B h L v t e",
        _wheel(
            "sglang/srt/mem_cache/pool_host/page_unified.py (PageUnifiedLayout.page_dims)",
            "page_unified is [pages, head groups, L, 2, P, heads of a group, D]",
        ),
        Golden(LLAMA, 131_072, 65_536, 8_192, 2_097_152, 2_097_152_000),
        note="with one head in each group",
    ),
    Entry(
        "sglang.hicache_mla_layer_first",
        "mla_fp8",
        "L B t f e",
        _wheel(HOST_MLA, "layer_first is [L, tokens, 1, row]"),
        Golden(GLM, 51_824, 41_984, 41_984_000, 41_984, 3_316_736_000),
    ),
    Entry(
        "sglang.hicache_mla_page_first",
        "mla_fp8",
        "B t L f e",
        _wheel(HOST_MLA, "page_first is [tokens, L, 1, row]"),
        Golden(GLM, 51_824, 41_984, 656, 3_316_736, 3_316_736_000),
    ),
    Entry(
        "sglang.hicache_mla_page_first_direct",
        "mla_fp8",
        "B L t f e",
        _wheel(HOST_MLA, "page_first_direct is [pages, L, P, 1, row]"),
        Golden(GLM, 51_824, 41_984, 41_984, 3_316_736, 3_316_736_000),
        note="page_unified has the same bytes for MLA",
    ),
    Entry(
        "sglang.hicache_indexer_layer_first",
        "index_fp8",
        "L B page",
        _wheel(HOST_DSA, "layer_first is [L, pages, P*132] of the layers that own an indexer"),
        Golden(GLM, 2_904, 8_448, 8_448_000, 8_448, 185_856_000),
        page=planes(("key", "t e"), ("scale", "t e")),
    ),
    Entry(
        "sglang.hicache_indexer_page_first",
        "index_fp8",
        "B L page",
        _wheel(HOST_DSA, "page_first and page_first_direct are [pages, L, 1, P*132]"),
        Golden(GLM, 2_904, 8_448, 8_448, 185_856, 185_856_000),
        page=planes(("key", "t e"), ("scale", "t e")),
    ),
)

ENTRIES = (*DEVICE, *HICACHE)

"""vLLM: latent rows and indexer keys on a device."""

from kvflow.layouts.catalogue.entry import Entry, Golden, Shape, Source, planes
from kvflow.layouts.catalogue.vllm import GLM

DSV4 = Shape(num_layers=4, num_blocks=1000, block_size=64)
DS_MLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py (note on the cache format)"
INDEXER = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"


def _wheel(where: str, says: str) -> Source:
    return Source("vLLM", "v0.32.0", where, says)


ENTRIES = (
    Entry(
        "vllm.mla_bf16",
        "mla_bf16",
        "L B t f e",
        _wheel(
            "vllm/v1/kv_cache_interface.py (MLAAttentionSpec)",
            "one latent row for each token, head size 512 + 64, no V, heads 1",
        ),
        Golden(GLM, 91_008, 73_728, 73_728_000, 73_728, 5_824_512_000),
    ),
    Entry(
        "vllm.fp8_ds_mla",
        "mla_fp8",
        "L B t f e",
        _wheel(
            DS_MLA,
            "656 bytes a token: 512 e4m3 values, 4 float32 scales of 128 values each, 64 bf16",
        ),
        Golden(GLM, 51_824, 41_984, 41_984_000, 41_984, 3_316_736_000),
    ),
    Entry(
        "vllm.nvfp4_ds_mla",
        "mla_nvfp4",
        "L B t f e",
        _wheel(
            DS_MLA,
            "352 bytes a token: 512 e2m1 values two to a byte, 64 e4m3 rope values, 32 e4m3 "
            "scales in the order 8*(s & 3) + (s >> 2)",
        ),
        Golden(GLM, 27_808, 22_528, 22_528_000, 22_528, 1_779_712_000),
        note="the order of scales is part of what the bytes mean, not of where they lie",
    ),
    Entry(
        "vllm.dsv4",
        "dsv4",
        "B L page",
        _wheel(
            DS_MLA + "; vllm/v1/attention/backends/mla/sparse_swa.py",
            "584 bytes a token: 448 e4m3 and 64 bf16 values as data rows of 576, 8 scale bytes; a "
            "page holds all data rows, then all scales, and is rounded up to 576",
        ),
        Golden(DSV4, 2_336, 37_376, 37_440, 149_760, 149_760_000),
        page=planes(("latent rope", "t f e"), ("scale", "t e"), multiple=576),
        note="layers of one spec packed in a block; a stored state may stand for several tokens",
    ),
    Entry(
        "vllm.dsv41",
        "dsv41",
        "B L page",
        _wheel(
            DS_MLA,
            "528 bytes a token: 512 e4m3 values, 16 scale bytes; data first, scales last, page "
            "rounded up to 512",
        ),
        Golden(DSV4, 2_112, 33_792, 33_792, 135_168, 135_168_000),
        page=planes(("latent", "t e"), ("scale", "t e"), multiple=512),
    ),
    Entry(
        "vllm.indexer",
        "index_fp8",
        "L B page",
        _wheel(
            INDEXER + " (fp8_paged_mqa_logits_torch)",
            "a page of N tokens is N*128 value bytes, then N float32 scales",
        ),
        Golden(GLM, 2_904, 8_448, 8_448_000, 8_448, 185_856_000),
        page=planes(("key", "t e"), ("scale", "t e")),
    ),
    Entry(
        "vllm.indexer_shuffled",
        "index_fp8",
        "L B page",
        _wheel(
            INDEXER + " (indexer_k_quant_and_cache_triton)",
            "values [B, N/16, 128/16, 16 tokens, 16 bytes], then N float32 scales, for blocks of "
            "more than one token on ROCm",
        ),
        Golden(GLM, 2_904, 8_448, 8_448_000, 8_448, 185_856_000),
        page=planes(("key", "t e t16 e16"), ("scale", "t e")),
        note="tiles of 16 by 16; the same size as the plain page, other bytes",
    ),
)

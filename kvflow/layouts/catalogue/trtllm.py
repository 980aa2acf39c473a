"""TensorRT-LLM: pools of blocks in which the layers of a block are packed."""

from kvflow.layouts.catalogue.entry import Entry, Golden, Source, planes
from kvflow.layouts.catalogue.vllm import GLM, LLAMA

MANAGER = "cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (WindowBlockManager::allocatePools)"
UTILS = "cpp/tensorrt_llm/kernels/kvCacheUtils.h (KVBlockArray::getKVLocalIdx), commit 0ccf9032"


def _main(where: str, says: str) -> Source:
    return Source("TensorRT-LLM", "main, 2026", where, says)


ENTRIES = (
    Entry(
        "trtllm.pool",
        "gqa",
        "B L v h t e",
        _main(
            f"{MANAGER}; {UTILS}",
            "a pool is [blocks, L, 2, block] and K and V of a block are [H, T, D]; the secondary "
            "pool in pinned host memory has the same order",
        ),
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
        note="a pool holds the layers with one number of heads and one attention window",
    ),
    Entry(
        "trtllm.mla_pool",
        "mla_bf16",
        "B L t f e",
        _main(
            f"{MANAGER}; {UTILS}",
            "for MLA the pool is [blocks, L, 1, block] with one head of R + dr elements",
        ),
        Golden(GLM, 91_008, 73_728, 73_728, 5_824_512, 5_824_512_000),
    ),
    Entry(
        "trtllm.indexer_pool",
        "index_fp8",
        "B L page",
        _main(
            "cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (createIndexerKCachePools); "
            "tensorrt_llm/_torch/attention_backend/sparse/dsa/indexer.py (_compute_slot_mappings)",
            "a pool of bytes that shares the block ids: of a block first T*128 key bytes, then T "
            "scales of 4 bytes",
        ),
        Golden(GLM, 2_904, 8_448, 8_448, 185_856, 185_856_000),
        page=planes(("key", "t e"), ("scale", "t e")),
        note="numbers are for 22 layers; the pool has as many as its main pool",
    ),
)

"""Named configurations: what a file may say, under a name."""

from collections.abc import Mapping

from kvflow.launch.keys import Tree

_MIB = 1 << 20

PRESETS: Mapping[str, Tree] = {
    # Two engines in six processes.
    "demo": {
        "pcp": 4,
        "dcp": 4,
        "interleave": 1,
        "decode_ranks": 2,
        "prefill_block": 16,
        "decode_block": 64,
        "kv_dtype": "fp8",
        "num_drafts": 3,
        "hisparse": True,
        "prefix": {"host_nbytes": 256 * _MIB},
    },
    # The deployment of the article (docs/preset-article.md) at its rank counts: PCP 8 x DCP 8 x
    # EP 8, and 8 data-parallel decode ranks. Experts are always split over the prefill ranks.
    "article": {
        "pcp": 8,
        "dcp": 8,
        "interleave": 1,
        "decode_ranks": 8,
        "prefill_block": 16,
        "decode_block": 64,
        "kv_dtype": "fp8",
        # One rank sums in another order than eight. In float64 that never decides a token.
        "dtype": "float64",
        "num_drafts": 3,
        "hisparse": True,
        "transport": "nixl",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        # Less than an agent session has, so that a part of it comes back from the host.
        "prefill_kv_tokens": 3072,
        "decode_kv_tokens": 4096,
        "prefix": {"host_nbytes": 128 * _MIB},
    },
}

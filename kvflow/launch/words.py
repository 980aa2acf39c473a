"""What each key of a configuration means, in which unit, and its flags where they differ from its
name: vLLM's names where the meaning is the same.

A key without words has a flag of its own name and no help; a test asks for the words.
"""

from collections.abc import Mapping

from attrs import frozen


@frozen
class Words:
    """`flags`: all that set the key, the first one is shown. `gib`: they take GiB, the key bytes.
    `sets`: another key that they set too, unless its own flag is given."""

    about: str
    unit: str = ""
    flags: tuple[str, ...] = ()
    gib: bool = False
    sets: str = ""


def _rows(about: str, *flags: str) -> Words:
    return Words(about, "tokens", flags)


def _ranks(about: str, *flags: str) -> Words:
    return Words(about, "ranks", flags)


WORDS: Mapping[str, Words] = {
    "model": Words("HF directory of the checkpoint"),
    "served_model_name": Words("name that clients use; empty: the directory's"),
    "pcp": _ranks("ranks that share a prompt", "--prefill-context-parallel-size", "--pcp"),
    "dcp": _ranks("KV shards over the prefill ranks", "--decode-context-parallel-size", "--dcp"),
    "interleave": _rows(
        "consecutive tokens that one DCP rank stores",
        "--cp-kv-cache-interleave-size",
        "--interleave",
    ),
    "tp": _ranks("prefill ranks that share the heads", "--tensor-parallel-size", "--tp"),
    "decode_ranks": Words(
        "data-parallel decode groups", "groups", ("--decode-ranks", "--data-parallel-size")
    ),
    "decode_tp": _ranks("ranks of a decode group that share the heads"),
    "decode_dcp": _ranks("ranks of a decode group that share the cache"),
    "decode_interleave": _rows("consecutive tokens that one rank of a decode group stores"),
    "prefill_block": _rows("size of a prefill KV block"),
    "decode_block": _rows("size of a decode KV block", "--decode-block", "--block-size"),
    "kv_dtype": Words("format of the KV rows", "", ("--kv-cache-dtype", "--kv-dtype")),
    "dtype": Words("what the model computes in"),
    "max_model_len": _rows("most positions of a request"),
    "max_num_batched_tokens": _rows("most tokens of a prefill step"),
    "max_num_seqs": Words("most requests of a decode batch", "requests"),
    "num_drafts": _rows(
        "what the MTP layer drafts a decode step", "--num-speculative-tokens", "--num-drafts"
    ),
    "hisparse": Words("decode with latent KV on the host and its hot rows on the device"),
    "hisparse_device_nbytes": Words("most that latent rows take on the device of a rank", "bytes"),
    "prefill_kv_tokens": _rows("what the cache of a prefill engine holds"),
    "decode_kv_tokens": _rows("what the cache of a decode group holds"),
    "transport": Words("a process a rank, or a thread a rank, without NIXL"),
    "verify_transfers": Words("compare digests of every transferred byte with its source"),
    "transfer_costs": Words("JSON that `kvflow calibrate` wrote on this machine"),
    "prefill_engines": Words("prefill engines, each of `pcp` x `tp` ranks", "engines"),
    "streaming": Words("decode reads the rows of a prompt while it is still computed"),
    "loans": Words("engines take from decode engines what those hold of a prompt"),
    "transfer": Words("who moves a prompt's rows: decode ranks pull, or prefill ranks push"),
    "stream_layers": Words("readable at a time while a step runs; 0: only its end", "layers"),
    "local_prefill_tokens": _rows("most of a prompt that a decode group may compute itself"),
    "prefix.enabled": Words(
        "reuse the KV of prompts that begin alike", "", ("--enable-prefix-caching",)
    ),
    "prefix.block_size": _rows("granularity of reuse; none: the prefill block", "--prefix-block"),
    "prefix.host_nbytes": Words(
        "host memory for KV of prefixes, of each prefill engine",
        "bytes",
        ("--host-tier-gib",),
        gib=True,
    ),
    "prefix.disk_directory": Words(
        "where the files of the disk tier lie", "", ("--disk-tier-directory",)
    ),
    "prefix.disk_nbytes": Words(
        "most that the files of each prefill engine take", "bytes", ("--disk-tier-gib",), gib=True
    ),
    "access.attention": Words(
        "what moves where KV is sharded: whole contexts, the union of chosen rows, or queries",
        flags=("--context-attention",),
        sets="decode_access.attention",
    ),
    "access.index": Words(
        "what moves for the indexer",
        flags=("--context-index",),
        sets="decode_access.index",
    ),
    "access.workspace_tokens": Words(
        "rows of other ranks held at once; longer contexts are processed in parts",
        "tokens",
        ("--workspace-tokens",),
        sets="decode_access.workspace_tokens",
    ),
    "access.overlap": Words(
        "fetch the next layer's rows while this one is computed",
        flags=("--overlap",),
        sets="decode_access.overlap",
    ),
    "decode_access.attention": Words(
        "the same in decode groups", flags=("--decode-context-attention",)
    ),
    "decode_access.index": Words("the same in decode groups", flags=("--decode-context-index",)),
    "decode_access.workspace_tokens": Words(
        "the same in decode groups", "tokens", ("--decode-workspace-tokens",)
    ),
    "decode_access.overlap": Words("the same in decode groups", flags=("--decode-overlap",)),
    "server.host": Words("address to listen on", flags=("--host",)),
    "server.port": Words("TCP port; 0 takes a free one", flags=("--port",)),
}


def words_of(name: str) -> Words:
    """The words of a key, made up from its name if it has none."""
    return WORDS.get(name, Words(""))


def flags_of(name: str) -> tuple[str, ...]:
    """The flags that set a key, the shown one first."""
    return words_of(name).flags or ("--" + name.replace(".", "-").replace("_", "-"),)

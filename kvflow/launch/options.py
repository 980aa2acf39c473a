"""The command line of a deployment. Long flags carry vLLM's names where the meaning is the same."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from kvflow.engine.access import AccessOptions
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig
from kvflow.layouts.values import MOST


@frozen
class ServeOptions:
    """What to launch and where to listen."""

    launch: LaunchConfig
    host: str
    port: int
    demo: bool


def parse_options(argv: Sequence[str], *, default_model: Path) -> ServeOptions:
    """Parses the command line; argparse ends the program for flags it does not know. Raises
    `LayoutError` for values that make no lawful deployment."""
    args = vars(_parser(default_model).parse_args(argv))
    host, port, demo = args.pop("host"), args.pop("port"), args.pop("demo")
    args.pop("enable_expert_parallel")
    args["prefix"] = _prefix(args)
    args["access"] = args["decode_access"] = _access(args)
    return ServeOptions(LaunchConfig(**args), host, port, demo)


_GIB = 1 << 30
_DEFAULT = {f.name: f.default for f in fields(LaunchConfig)}


def _parser(default_model: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serve a glm_moe_dsa model from a prefill engine and decode ranks.",
    )
    parser.add_argument(
        "--model", type=Path, default=default_model, help="HF directory of the checkpoint"
    )
    parser.add_argument("--served-model-name", default="", help="default: the directory's name")
    _add_ranks(parser)
    _add_decode(parser)
    _add_formats(parser)
    _add_limits(parser)
    _add_prefix(parser)
    _add_access(parser)
    parser.add_argument(
        "--verify-transfers",
        action="store_true",
        help="compare digests of every transferred byte with its source",
    )
    parser.add_argument(
        "--transfer-costs", type=Path, help="JSON that `kvflow calibrate` wrote on this machine"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free port")
    parser.add_argument("--demo", action="store_true", help="send a few prompts, report and end")
    return parser


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    _number(parser, "pcp", "--prefill-context-parallel-size", "--pcp", about="prefill ranks")
    _number(parser, "tp", "--tensor-parallel-size", "--tp", about="ranks that share the heads")
    _number(parser, "dcp", "--decode-context-parallel-size", "--dcp", about="KV shards over them")
    _number(
        parser,
        "interleave",
        "--cp-kv-cache-interleave-size",
        "--interleave",
        about="consecutive tokens that one DCP rank stores",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=True,
        help="accepted for familiarity: experts are always split over the prefill ranks",
    )
    parser.add_argument(
        "--transport",
        default=_DEFAULT["transport"],
        choices=("nixl", "in-process"),
        help="nixl: a process a rank; in-process: a thread a rank, for machines without NIXL",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _number(parser, "decode_ranks", "--decode-ranks", "--data-parallel-size", about="decode groups")
    _number(parser, "decode_tp", "--decode-tp", about="ranks of a group that share the heads")
    _number(parser, "decode_dcp", "--decode-dcp", about="ranks of a group that share the cache")
    _number(
        parser,
        "decode_interleave",
        "--decode-interleave",
        about="consecutive tokens that one rank of a group stores",
    )
    _number(
        parser,
        "num_drafts",
        "--num-speculative-tokens",
        "--num-drafts",
        about="tokens that the MTP layer drafts a step",
    )
    parser.add_argument(
        "--hisparse",
        action="store_true",
        help="decode with latent KV on the host and its hot rows on the device",
    )
    parser.add_argument(
        "--hisparse-device-nbytes", type=int, help="most bytes of latent rows on the device"
    )


def _add_formats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-cache-dtype",
        "--kv-dtype",
        dest="kv_dtype",
        default=_DEFAULT["kv_dtype"],
        choices=("fp8", "bfloat16", "float32", "float64"),
        help="format of the KV rows",
    )
    parser.add_argument(
        "--dtype",
        default=_DEFAULT["dtype"],
        choices=("float32", "float64"),
        help="what the model computes in",
    )
    _number(parser, "prefill_block", "--prefill-block", about="tokens per prefill KV block")
    _number(
        parser, "decode_block", "--decode-block", "--block-size", about="tokens per decode KV block"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, about in (
        ("max_model_len", "most positions of a request"),
        ("max_num_batched_tokens", "tokens of a prefill step"),
        ("max_num_seqs", "requests of a decode batch"),
        ("prefill_kv_tokens", "tokens the prefill cache holds"),
        ("decode_kv_tokens", "tokens each decode cache holds"),
    ):
        _number(parser, name, "--" + name.replace("_", "-"), about=about)


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prompts that begin alike",
    )
    parser.add_argument(
        "--prefix-block", type=int, help="tokens per reused block (default: the prefill block's)"
    )
    parser.add_argument(
        "--host-tier-gib", type=_gib, default=0, help="host memory for KV of prefixes, in GiB"
    )
    parser.add_argument("--disk-tier-directory", type=Path, help="where the disk tier's files lie")
    parser.add_argument(
        "--disk-tier-gib", type=_gib, default=0, help="most bytes of these files, in GiB"
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    options = AccessOptions()
    parser.add_argument(
        "--context-attention",
        choices=("auto", "whole", "union", "queries"),
        default=options.attention,
        help="what moves where KV is sharded: whole contexts, chosen rows, or queries",
    )
    parser.add_argument(
        "--context-index",
        choices=("auto", "keys", "queries"),
        default=options.index,
        help="what moves for the indexer: keys or queries",
    )
    parser.add_argument(
        "--workspace-tokens",
        type=int,
        default=options.workspace_tokens,
        help="rows of other ranks held at once; longer contexts are processed in parts",
    )
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=options.overlap,
        help="fetch the next layer's rows while this one is computed",
    )


def _access(args: dict[str, Any]) -> AccessOptions:
    """Takes the flags of context access out of the others."""
    return AccessOptions(
        args.pop("context_attention"),
        args.pop("context_index"),
        args.pop("workspace_tokens"),
        args.pop("overlap"),
    )


def _prefix(args: dict[str, Any]) -> PrefixConfig:
    """Takes the flags of prefix reuse out of the others."""
    return PrefixConfig(
        args.pop("enable_prefix_caching"),
        args.pop("prefix_block"),
        args.pop("host_tier_gib"),
        args.pop("disk_tier_directory"),
        args.pop("disk_tier_gib"),
    )


def _gib(text: str) -> int:
    """Bytes; any part of one is one, lest a size above 0 become none."""
    nbytes = float(text) * _GIB
    if not 0 <= nbytes <= MOST:
        raise argparse.ArgumentTypeError(f"{text} GiB, must be in [0, {MOST // _GIB}]")
    return math.ceil(nbytes)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"port {port}, must be in [0, 65536)")
    return port


def _number(parser: argparse.ArgumentParser, name: str, *flags: str, about: str) -> None:
    parser.add_argument(*flags, dest=name, type=int, default=_DEFAULT[name], help=about)

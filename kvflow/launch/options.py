"""The command line of a deployment. Long flags carry vLLM's names where the meaning is the same."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from attrs import fields, frozen

from kvflow.launch.config import LaunchConfig


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
    return ServeOptions(LaunchConfig(**args), host, port, demo)


def _parser(default_model: Path) -> argparse.ArgumentParser:
    default = {f.name: f.default for f in fields(LaunchConfig)}
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serve a glm_moe_dsa model from a prefill engine and decode ranks.",
    )

    def number(name: str, *flags: str, help: str) -> None:
        parser.add_argument(*flags, dest=name, type=int, default=default[name], help=help)

    parser.add_argument(
        "--model", type=Path, default=default_model, help="HF directory of the checkpoint"
    )
    parser.add_argument("--served-model-name", default="", help="default: the directory's name")
    number("pcp", "--prefill-context-parallel-size", "--pcp", help="prefill ranks")
    number("dcp", "--decode-context-parallel-size", "--dcp", help="KV shards over these ranks")
    number(
        "interleave",
        "--cp-kv-cache-interleave-size",
        "--interleave",
        help="consecutive tokens that one DCP rank stores",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=True,
        help="accepted for familiarity: experts are always split over the prefill ranks",
    )
    number("decode_ranks", "--decode-ranks", "--data-parallel-size", help="decode ranks")
    number("prefill_block", "--prefill-block", help="tokens per prefill KV block")
    number("decode_block", "--decode-block", "--block-size", help="tokens per decode KV block")
    parser.add_argument(
        "--kv-cache-dtype",
        "--kv-dtype",
        dest="kv_dtype",
        default=default["kv_dtype"],
        choices=("fp8", "bfloat16", "float32", "float64"),
        help="format of the KV rows",
    )
    parser.add_argument(
        "--dtype",
        default=default["dtype"],
        choices=("float32", "float64"),
        help="what the model computes in",
    )
    number("max_model_len", "--max-model-len", help="most positions of a request")
    number("max_num_batched_tokens", "--max-num-batched-tokens", help="tokens of a prefill step")
    number("max_num_seqs", "--max-num-seqs", help="requests of a decode batch")
    number("prefill_kv_tokens", "--prefill-kv-tokens", help="tokens the prefill cache holds")
    number("decode_kv_tokens", "--decode-kv-tokens", help="tokens each decode cache holds")
    parser.add_argument(
        "--transport",
        default=default["transport"],
        choices=("nixl", "in-process"),
        help="nixl: a process a rank; in-process: a thread a rank, for machines without NIXL",
    )
    parser.add_argument(
        "--verify-transfers",
        action="store_true",
        help="compare digests of every transferred byte with its source",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--demo", action="store_true", help="send a few prompts, report and end")
    return parser

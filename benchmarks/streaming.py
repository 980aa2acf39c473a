"""What streaming is worth: decode reads a prompt's rows while prefill computes it, or afterwards.

    python benchmarks/streaming.py [--tokens 4096] [--chunk 512] [--repeats 5] [--transport nixl]

One deployment for each way, each serves the same prompts. Printed are medians: the time to the
first token, which prefill samples; the time from there to the second, which decode can sample only
when all rows are there; both as ratios to reading afterwards; and the bytes that were left to move,
or under way, when prefill ended, as a share of those of its last chunk.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import numpy as np
from attrs import evolve

from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-glm-python"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transport", choices=["nixl", "in-process"], default="in-process")
    return parser.parse_args()


def deployment(launch: LaunchConfig):
    if launch.transport == "nixl":
        from kvflow.launch.processes import process_deployment

        return process_deployment(launch)
    from kvflow.launch.threads import thread_deployment

    return thread_deployment(launch)


async def one(engine, name: str, prompt: tuple[int, ...]) -> tuple[float, float, dict]:
    """Seconds to the first token, from there to the second, and the transfer's report."""
    began, times, report = time.perf_counter(), [], None
    async for output in engine.generate(Request(name, prompt, SamplingParams(4, ignore_eos=True))):
        times.append(time.perf_counter() - began)
        report = report or output.transfer
    return times[0], times[1] - times[0], report


async def measured(launch: LaunchConfig, prompts) -> tuple[float, float, float, float]:
    async with deployment(launch) as engine:
        await one(engine, "warm", prompts[0])
        runs = [await one(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    first, gap, reports = zip(*runs, strict=True)
    last = prompts[0][-launch.max_num_batched_tokens :]
    chunk_nbytes = reports[0]["nbytes"] * len(last) / len(prompts[0])
    late = max(r["late_nbytes"] for r in reports) / chunk_nbytes
    return statistics.median(first), statistics.median(gap), late, reports[0]["nbytes"] / 2**20


def main() -> None:
    args = arguments()
    launch = LaunchConfig(
        MODEL,
        pcp=2,
        dcp=2,
        prefill_block=16,
        max_model_len=args.tokens + 64,
        max_num_batched_tokens=args.chunk,
        transport=args.transport,
        prefix=PrefixConfig(enabled=False),
    )
    rng = np.random.default_rng(0)
    vocab = launch.vocab_size()
    prompts = [tuple(rng.integers(0, vocab, args.tokens).tolist()) for _ in range(args.repeats)]
    ways = {"after prefill": {"streaming": False}, "every chunk": {}}
    ways["every 2 layers"] = {"stream_layers": 2}
    ways |= {f"pushed, {way}": ways[way] | {"transfer": "push"} for way in list(ways)[1:]}
    base = None
    print(f"{args.tokens} tokens in chunks of {args.chunk}, {args.transport}, PCP2 x DCP2, I=1")
    print("| rows are read | first token | to the second | ratio | ratio | left at the end |")
    print("|---|---|---|---|---|---|")
    for name, changes in ways.items():
        first, gap, late, mib = asyncio.run(measured(evolve(launch, **changes), prompts))
        base = base or (first, gap)
        print(
            f"| {name} | {first:.3f} s | {gap * 1e3:.0f} ms | {first / base[0]:.2f} | "
            f"{gap / base[1]:.2f} | {late:.2f} of the last chunk ({mib:.1f} MiB in all) |",
            flush=True,
        )


if __name__ == "__main__":
    main()

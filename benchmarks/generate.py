"""One rank of kvflow against transformers' `generate`, on the same checkpoint, in one run.

    python benchmarks/generate.py [--rounds R] [--steps N] [--threads T] [--prompts P ...]

Both compute in float32 with the same number of torch threads and take turns in every round, so a
ratio is the median of ratios within rounds. kvflow's side is the engines' `StepRunner` over pages
of 64 tokens, without a cache for the MTP layer, as transformers has none; ``--mtp`` fills one too.
Decoding is greedy and ignores the end token; the tokens of both sides are compared. Times are of
the process's CPU, which other processes on the machine stretch less than they do wall time;
``--wall`` takes that. Apart from model time stand a step's scheduling and planning: the deal and
the plan of the step, opening the cache, host-side rows and block tables, and taking the tokens.
"""

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import define, evolve, field
from measure import load

from kvflow.comm import LocalComm
from kvflow.engine.api import SamplingParams
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models import Glm
from kvflow.transfers.executors.base import RankCache

MODEL = Path(__file__).parent.parent / "examples" / "models" / "tiny-glm-python"
BLOCK = 64
Clock = Callable[[], float]


@define
class Spent:
    """Seconds of one generation: prefill, all decode steps, and what of these no model took."""

    prefill: float = 0.0
    decode: float = 0.0
    planning: float = 0.0
    tokens: list[list[int]] = field(factory=list)


@define(eq=False)
class Ours:
    """A model and the clock that its calls are charged to."""

    glm: Glm
    clock: Clock
    with_mtp: bool = False
    model_seconds: float = 0.0

    def generate(self, prompts: list[list[int]], num_steps: int) -> Spent:
        runner, tables = self._runner(prompts, num_steps)
        sampling = SamplingParams(num_steps + 1, temperature=0, ignore_eos=True)
        spent, last = Spent(tokens=[[] for _ in prompts]), prompts
        for number in range(num_steps + 1):
            self.model_seconds, begin = 0.0, self.clock()
            items = [
                StepItem(str(i), len(p) + number - 1 if number else 0, last[i], None, t, sampling)
                for i, (p, t) in enumerate(zip(prompts, tables, strict=True))
            ]
            emitted = runner.run(items)
            last = [[emitted[str(i)][0].token] for i in range(len(prompts))]
            seconds = self.clock() - begin
            for mine, new in zip(spent.tokens, last, strict=True):
                mine += new
            if number == 0:
                spent.prefill = seconds
            else:
                spent.decode += seconds
                spent.planning += seconds - self.model_seconds
        return spent

    def _runner(self, prompts: list[list[int]], num_steps: int) -> tuple[StepRunner, list]:
        each = -(-(len(prompts[0]) + num_steps + 1) // BLOCK)
        everywhere = Placement.simple(Replicated())
        layout = KVLayout.uniform(self._spec, everywhere, Paged(BLOCK))
        (group,) = layout.groups
        cache = RankCache.allocate(layout, 0, {group.name: each * len(prompts)})
        tables = [{group.name: list(range(i * each, (i + 1) * each))} for i in range(len(prompts))]
        return StepRunner.over(self.glm, layout, cache, LocalComm()), tables

    @property
    def _spec(self) -> KVCacheSpec:
        whole = self.glm.spec
        kept = [c for c in whole.components if self.with_mtp or c.part == "main"]
        return evolve(whole, components=kept)

    def watch(self) -> None:
        """Charges the model's calls to `model_seconds`."""
        for name in ("forward", "logits", "write_mtp"):
            setattr(Glm, name, self._charged(getattr(Glm, name)))

    def _charged(self, call: Callable[..., object]) -> Callable[..., object]:
        def charged(*args: object) -> object:
            begin = self.clock()
            result = call(*args)
            self.model_seconds += self.clock() - begin
            return result

        return charged


@define(eq=False)
class Theirs:
    """transformers' model; the first token ends its prefill."""

    model: torch.nn.Module
    clock: Clock

    def generate(self, prompts: list[list[int]], num_steps: int) -> Spent:
        ids, num, ends = torch.tensor(prompts), num_steps + 1, []

        def token_made(ids: torch.Tensor, scores: object, **rest: object) -> torch.Tensor:
            ends.append(self.clock())
            return torch.zeros(len(ids), dtype=torch.bool)

        begin = self.clock()
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num,
                min_new_tokens=num, pad_token_id=0, stopping_criteria=[token_made],
            )  # fmt: skip
        tokens = out[:, len(prompts[0]) :].tolist()
        return Spent(ends[0] - begin, ends[-1] - ends[0], tokens=tokens)


def compare(ours: Ours, theirs: Theirs, batch: int, length: int, args: argparse.Namespace) -> None:
    """One row of the table."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(5, 4096, (batch, length), generator=generator).tolist()
    rounds = []
    for i in range(args.rounds + 1):
        pair = ours.generate(prompts, args.steps), theirs.generate(prompts, args.steps)
        if i:  # the round before warms both
            rounds.append(pair)
    mine, other = rounds[0]
    same = sum(
        a == b
        for x, y in zip(mine.tokens, other.tokens, strict=True)
        for a, b in zip(x, y, strict=True)
    )

    def middle(value: Callable[[Spent, Spent], float]) -> float:
        return statistics.median(value(*pair) for pair in rounds)

    num = args.steps
    print(
        f"| {batch} | {length} "
        f"| {middle(lambda a, b: a.decode) / num * 1e3:.1f} "
        f"| {middle(lambda a, b: a.planning) / num * 1e3:.1f} "
        f"| {middle(lambda a, b: b.decode) / num * 1e3:.1f} "
        f"| **{middle(lambda a, b: b.decode / a.decode):.2f}** "
        f"| {middle(lambda a, b: a.prefill):.3f} | {middle(lambda a, b: b.prefill):.3f} "
        f"| **{middle(lambda a, b: b.prefill / a.prefill):.2f}** "
        f"| {same}/{batch * (num + 1)} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 1024])
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from transformers import AutoModelForCausalLM

    clock = time.perf_counter if args.wall else time.process_time
    ours = Ours(Glm.load(MODEL, kv_dtype="float32"), clock, args.mtp)
    ours.watch()
    theirs = Theirs(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), clock)
    gc.freeze()  # as ranks do: neither side walks over all that transformers imports
    kind = "wall" if args.wall else "CPU"
    print(f"{args.threads} torch thread(s), {kind} time, medians of {args.rounds}, {load()}\n")
    print("| batch | prompt | step, ms | of it planning, ms | theirs, ms | **decode, times** "
          "| prefill, s | theirs, s | **prefill, times** | equal tokens |")  # fmt: skip
    print("|" + "---|" * 10)
    for batch in args.batches:
        for length in args.prompts:
            compare(ours, theirs, batch, length, args)
    print(f"\nend: {load()}")
    gc.unfreeze()


if __name__ == "__main__":
    main()

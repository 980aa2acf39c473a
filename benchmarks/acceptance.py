"""Tokens per target step of speculative decoding, with the checkpoint of this repository.

    python benchmarks/acceptance.py [--texts N] [--json FILE]

Prompts are 256 tokens of held-out files. A greedy text of the little model often falls into a loop,
in which every draft comes true, so only prompts count whose text has no phrase of up to 32 tokens
three times in a row; the first N (20) are taken, file after file, window after window. Their texts,
found without drafts, are then decoded again with drafts, all together, and must be equal.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import define, field
from tokenizers import Tokenizer

from kvflow.comm import LocalComm
from kvflow.engine.api import SamplingParams
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.engine.spec.counters import SpecCounters
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL = EXAMPLES / "models" / "tiny-glm-python"
sys.path.insert(0, str(EXAMPLES))
from train_tiny_glm import library_files  # noqa: E402

NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS, NUM_DRAFTS = 20, 256, 104, 3
BATCH = 16
LONGEST_PHRASE, TIMES = 32, 3
Prompt = tuple[str, tuple[int, ...]]


def loops(text: Sequence[int], longest: int = LONGEST_PHRASE, times: int = TIMES) -> bool:
    """Whether a phrase of 1 to `longest` tokens stands `times` times in a row somewhere.

    >>> loops([1, 2, 3, 2, 3, 2, 3]), loops([1, 2, 3, 2, 3])
    (True, False)
    """
    for size in range(1, longest + 1):
        repeated = 0
        for here, before in zip(text[size:], text, strict=False):
            repeated = repeated + 1 if here == before else 0
            if repeated == size * (times - 1):
                return True
    return False


def windows(tokenizer: Tokenizer) -> Iterator[Prompt]:
    """(name, ids) of the first window of every held-out file, then of the second, and so on. The
    first token is <sop>, as the tokenizer puts it before every text."""
    files = [
        (p.name, tokenizer.encode(p.read_text(errors="ignore")).ids) for p in library_files()[1]
    ]
    for start in range(1, max(len(ids) for _, ids in files), PROMPT_LEN):
        for name, ids in files:
            window = ids[start : start + PROMPT_LEN - 1]
            if len(window) == PROMPT_LEN - 1:
                yield f"{name}:{start}", (ids[0], *window)


@define(eq=False)
class Text:
    """A prompt and what has come of it."""

    prompt: Prompt
    blocks: list[int]
    tokens: list[int] = field(factory=list)

    def item(self, num_drafts: int) -> StepItem:
        """The whole prompt, or the newest token and drafts behind it."""
        name, ids = self.prompt
        left = NUM_TOKENS - len(self.tokens)
        start = len(ids) + len(self.tokens) - 1 if self.tokens else 0
        return StepItem(
            name,
            start,
            self.tokens[-1:] or list(ids),
            None,
            {"kv": self.blocks},
            SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True),
            num_drafts=min(num_drafts, left - 1) if self.tokens else 0,
        )


def decode(
    model: Glm, prompts: Sequence[Prompt], num_drafts: int, *, drop_loops: bool = False
) -> tuple[list[Text], SpecCounters]:
    """The prompts continued in one batch, and the counters of the steps behind their prefill."""
    layout = KVLayout.uniform(model.spec, Placement.simple(Replicated()), Paged(64))
    each = layout.num_blocks_for(PROMPT_LEN + NUM_TOKENS)["kv"]
    cache = RankCache.allocate(layout, 0, {"kv": each * len(prompts)})
    runner = StepRunner.over(model, layout, cache, LocalComm())
    texts = [Text(p, list(range(i * each, (i + 1) * each))) for i, p in enumerate(prompts)]
    for text in texts:
        text.tokens += [s.token for s in runner.run([text.item(0)])[text.prompt[0]]]
    runner.counters = SpecCounters()
    live = texts
    while live := [t for t in live if len(t.tokens) < NUM_TOKENS]:
        emitted = runner.run([text.item(num_drafts) for text in live])
        for text in live:
            text.tokens += [s.token for s in emitted[text.prompt[0]]]
        if drop_loops:
            live = [text for text in live if not loops(text.tokens)]
    return texts, runner.counters


def find_prompts(model: Glm, tokenizer: Tokenizer, num: int) -> tuple[list[Text], int]:
    """The first `num` texts that do not loop, and how many prompts were tried."""
    found: list[Text] = []
    tried, some = 0, windows(tokenizer)
    while len(found) < num:
        batch = [prompt for _, prompt in zip(range(BATCH), some, strict=False)]
        if not batch:
            raise SystemExit(f"only {len(found)} of {tried} prompts give a text without a loop")
        texts, _ = decode(model, batch, 0, drop_loops=True)
        good = [t for t in texts if len(t.tokens) == NUM_TOKENS and not loops(t.tokens)]
        last = good[: num - len(found)]
        tried += len(batch)
        found += last
        print(f"{len(found)} of {tried} prompts tried give a text without a loop", flush=True)
    return found, tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=NUM_PROMPTS, help="that do not loop")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if args.texts < 1:
        parser.error(f"--texts is {args.texts}, must be at least 1")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    model = Glm.load(MODEL, kv_dtype="float32")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    expected, tried = find_prompts(model, tokenizer, args.texts)
    prompts = [text.prompt for text in expected]
    began = time.perf_counter()
    texts, drafted = decode(model, prompts, NUM_DRAFTS)
    same = [t.tokens for t in texts] == [t.tokens for t in expected]
    figures = {
        "prompts": len(prompts),
        "prompts_tried": tried,
        "tokens_by_target_steps": drafted.emitted,
        "target_steps": drafted.steps,
        "tokens_per_target_step": round(drafted.acceptance_length, 3),
        "accepted": [
            round(drafted.accepted[i] / drafted.proposed[i], 3) for i in range(NUM_DRAFTS)
        ],
        "text_is_identical": same,
        "seconds": round(time.perf_counter() - began, 1),
        "windows": [name for name, _ in prompts],
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    reached = drafted.emitted >= 100 * args.texts and drafted.acceptance_length > 1.5
    return 0 if same and reached else 1


if __name__ == "__main__":
    sys.exit(main())

"""What `serve_glm.py --demo` sends: real prompts from the Python standard library, concurrently,
through the unmodified `openai` client; then a table of what each request cost."""

import argparse
import asyncio
import inspect
import json
import textwrap
import time
from typing import Any

from attrs import define, field, frozen
from openai import AsyncOpenAI

from kvflow.launch.config import LaunchConfig

LONG_PROMPT_CHARACTERS = 14_000
MAX_TOKENS = 48


@frozen
class Prompt:
    """One request of the demo."""

    name: str
    text: str
    temperature: float = 0.0


@define
class Outcome:
    """What the client saw. Times are seconds on its own clock."""

    prompt: Prompt
    text: str = ""
    began: float = 0.0
    arrivals: list[float] = field(factory=list)
    usage: Any = None
    transfer: dict[str, Any] = field(factory=dict)

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed again."""
        return int(self.usage.prompt_tokens_details.cached_tokens)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def itl(self) -> float:
        """Mean inter-token latency."""
        tokens = self.usage.completion_tokens
        return (self.arrivals[-1] - self.arrivals[0]) / max(tokens - 1, 1)


def first_prompts() -> list[Prompt]:
    """One of several thousand tokens, and three shorter ones."""
    source = inspect.getsource(argparse)
    shared = inspect.getsource(textwrap)[:2400]
    return [
        Prompt("long", source[:LONG_PROMPT_CHARACTERS]),
        Prompt("shared-a", shared + "\n\ndef wrap_paragraph(text, width):\n"),
        Prompt("short", "import os\n\ndef read_lines(path):\n"),
        Prompt("sampled", '"""Utilities for', temperature=0.7),
    ]


def second_prompts(first: list[Outcome]) -> list[Prompt]:
    """What goes on from the first ones: a next turn behind the long prompt and its answer, and
    another continuation of the shared text."""
    answers = {o.prompt.name: o for o in first}
    turn = answers["long"].prompt.text + answers["long"].text + "\n\n    def check(self):\n"
    shared = inspect.getsource(textwrap)[:2400]
    return [
        Prompt("next turn", turn),
        Prompt("shared-b", shared + "\n\nclass Wrapper:\n    def __init__(self"),
    ]


async def run_demo(url: str, model: str, launch: LaunchConfig) -> int:
    """Sends the prompts, prints texts and table. Returns 0 if every transfer was verified."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        outcomes = await asyncio.gather(*[_one(client, model, p) for p in first_prompts()])
        second = second_prompts(outcomes)
        outcomes += await asyncio.gather(*[_one(client, model, p) for p in second])
    for outcome in outcomes:
        _show(outcome)
    _table(outcomes, launch)
    verified = all(o.transfer.get("verified") is True for o in outcomes)
    print("every transferred byte equals its source" if verified else "NOT VERIFIED")
    return 0 if verified else 1


async def _one(client: AsyncOpenAI, model: str, prompt: Prompt) -> Outcome:
    outcome = Outcome(prompt, began=time.perf_counter())
    stream = await client.completions.create(
        model=model,
        prompt=prompt.text,
        max_tokens=MAX_TOKENS,
        temperature=prompt.temperature,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kvflow_report": True, "ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            outcome.arrivals.append(time.perf_counter())
            outcome.text += chunk.choices[0].text
        if chunk.usage is not None:
            outcome.usage = chunk.usage
        report = (chunk.model_extra or {}).get("kvflow")
        if report is not None:
            outcome.transfer = report["choices"][0].get("transfer") or {}
    print(f"[{prompt.name}] {outcome.usage.completion_tokens} tokens streamed", flush=True)
    return outcome


def _show(outcome: Outcome) -> None:
    tail = outcome.prompt.text[-160:]
    print(f"\n--- {outcome.prompt.name}: ...{json.dumps(tail)[1:-1]}")
    print(textwrap.indent(outcome.text, "    "))


def _table(outcomes: list[Outcome], launch: LaunchConfig) -> None:
    header = (
        f"{'request':10} {'prompt':>6} {'cached':>6} {'out':>4} {'TTFT s':>7} {'ITL ms':>7} "
        f"{'KV bytes':>11} {'descriptors':>11} {'links':>5}  {'plan digest':16} verified"
    )
    print(f"\npcp {launch.pcp} x dcp {launch.dcp} (interleave {launch.interleave}), prefill block "
          f"{launch.prefill_block} -> decode block {launch.decode_block}, kv {launch.kv_dtype}, "
          f"transport {launch.transport}")  # fmt: skip
    print(header)
    for o in outcomes:
        t = o.transfer
        verified = {True: "yes", False: "NO", None: "-"}[t.get("verified")]
        usage, digest = o.usage, t.get("plan_digest", "")[:16]
        nbytes, descriptors, links = (
            t.get(k, 0) for k in ("nbytes", "num_descriptors", "num_links")
        )
        print(
            f"{o.prompt.name:10} {usage.prompt_tokens:6} {o.cached:6} {usage.completion_tokens:4} "
            f"{o.ttft:7.2f} {o.itl * 1000:7.1f} {nbytes:11,} {descriptors:11,} {links:5}  "
            f"{digest:16} {verified}"
        )

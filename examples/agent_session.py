"""An agent session as `serve_glm.py --session FILE` plays it: turns that begin like earlier ones,
sub-agents at the same time, real text. Afterwards one rank alone plays it too, and every token is
compared; prefix hits are told per tier and pools are audited.

Nothing here knows more of an engine than `EngineClient` and its metrics.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from attrs import frozen
from one_rank import OneRank  # these lie beside this file
from session_turns import Session, Turn

from kvflow.engine.api import EngineClient, Request, SamplingParams
from kvflow.errors import KvflowError
from kvflow.launch.config import LaunchConfig
from kvflow.models.config import GlmConfig

_IDLE_S = 60.0


@frozen
class Played:
    """What a turn was asked and what came back; seconds on the client's clock."""

    turn: Turn
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    cached: int
    ttft: float
    seconds: float
    transfer: Mapping[str, Any] | None

    @property
    def said(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and answer."""
        return self.prompt, self.tokens


class Resettable(EngineClient, Protocol):
    """An engine whose prefix caches can be emptied."""

    def reset_prefix_cache(self) -> Mapping[str, int]: ...


async def run_session(
    engine: Resettable, launch: LaunchConfig, session: Session
) -> tuple[dict[str, Played], bool]:
    """Plays a session and prints what became of it. Returns the turns, and whether every transfer
    was verified and no pool lost or kept a block."""
    began = time.perf_counter()
    played = await play(engine, session)
    print_turns(played, time.perf_counter() - began)
    print_tiers(engine, played)
    verified = print_transfers(played)
    num_pools = len(await audit(engine, launch))
    engine.reset_prefix_cache()
    after = await audit(engine, launch)
    kept = {p: n for p, pool in after.items() if is_prefill(p) and (n := pool.get("cached", 0))}
    print(f"audit: {num_pools} pools, all blocks free or cached; after a reset of the prefix cache "
          f"prefill engines keep {kept or 'none'}", flush=True)  # fmt: skip
    return played, verified and not kept


async def check_session(
    launch: LaunchConfig, session: Session, played: Mapping[str, Played]
) -> bool:
    """Whether one rank alone, playing the same session, asks and answers the same tokens."""
    reference = await play(OneRank(launch), session)
    wrong = turns_that_differ(played, reference)
    num_tokens = sum(len(one.tokens) for one in played.values())
    verdict = f"other tokens in {wrong}" if wrong else "the same tokens"
    print(f"reference: one rank alone computes {verdict}; {num_tokens} in {len(played)} turns")
    return not wrong


def turns_that_differ(played: Mapping[str, Played], reference: Mapping[str, Played]) -> list[str]:
    """Turns whose prompt or answer is another."""
    return [name for name in played if played[name].said != reference[name].said]


async def play(engine: EngineClient, session: Session) -> dict[str, Played]:
    """Plays every turn as soon as those before it have ended. The main agent is greedy, the
    others are sampled with a seed."""
    loop = asyncio.get_running_loop()
    prompts = {turn.name: loop.create_future() for turn in session.turns}
    ended = {turn.name: loop.create_future() for turn in session.turns}

    async def follow(seed: int, turn: Turn) -> None:
        for name in turn.after:
            await ended[name]
        history: tuple[int, ...] = ()
        if turn.extends is not None:
            history = await prompts[turn.extends]
            if len(history) < turn.shared:
                history += (await ended[turn.extends]).tokens
        prompt = history[: turn.shared] + session.added[turn.name]
        prompts[turn.name].set_result(prompt)
        temperature = 0.0 if turn.agent == "main" else 0.7
        sampling = SamplingParams(turn.max_tokens, temperature, seed=seed, ignore_eos=True)
        played = await _one(engine, turn, Request(turn.name, prompt, sampling))
        ended[turn.name].set_result(played)

    async with asyncio.TaskGroup() as group:
        for seed, turn in enumerate(session.turns):
            group.create_task(follow(seed, turn))
    return {name: future.result() for name, future in ended.items()}


async def _one(engine: EngineClient, turn: Turn, request: Request) -> Played:
    began, arrivals, outputs = time.perf_counter(), [], []
    async for output in engine.generate(request):
        arrivals.append(time.perf_counter() - began)
        outputs.append(output)
    return Played(
        turn,
        request.prompt,
        tuple(o.token for o in outputs),
        outputs[0].cached_tokens,
        arrivals[0],
        arrivals[-1],
        next((o.transfer for o in outputs if o.transfer is not None), None),
    )


# --- what the engine's metrics say


def by_tier(engine: EngineClient) -> dict[str, int]:
    """Prompt tokens reused so far, by the tier that had them."""
    tiers: dict[str, int] = {}
    for metric in engine.metrics():
        if metric.name == "kvflow_prefix_reused_tokens_total":
            for sample in metric.samples:
                tier = sample.labels["tier"]
                tiers[tier] = tiers.get(tier, 0) + int(sample.value)
    return tiers


def held_by_decode(engine: EngineClient) -> int:
    """Prompt tokens whose rows no decode group had to be sent, since it had them."""
    return sum(
        int(sample.value)
        for metric in engine.metrics()
        if metric.name == "kvflow_rank_total"
        for sample in metric.samples
        if sample.labels["name"] == "reused_tokens"
    )


Pool = tuple[str, str]
"""Of a prefill engine or a decode group, and a group of components."""

Pools = dict[Pool, dict[str, int]]
"""Blocks by state."""


def is_prefill(pool: Pool) -> bool:
    """Whether it is a prefill engine's."""
    return pool[0].startswith("prefill")


def pools_of(engine: EngineClient) -> Pools:
    """The pools of all engines. A decode group that has done nothing tells nothing."""
    pools: Pools = {}
    for metric in engine.metrics():
        for sample in metric.samples:
            labels = sample.labels
            if metric.name == "kvflow_prefill_blocks":
                pool = labels["engine"], labels["group"]
                pools.setdefault(pool, {})[labels["state"]] = int(sample.value)
            elif metric.name == "kvflow_rank" and "_blocks." in labels["name"]:
                state, _, group = labels["name"].partition("_blocks.")
                pools.setdefault((labels["rank"], group), {})[state] = int(sample.value)
    return pools


async def audit(engine: EngineClient, launch: LaunchConfig) -> Pools:
    """The pools of an idle engine: every block of each is free or cached, and none is missing.
    Raises `KvflowError` with the pools if that is not so within a minute."""
    spec = GlmConfig.load(launch.model).kv_spec(kv_dtype=launch.kv_dtype)
    prefill = launch.prefill_layout(spec).num_blocks_for(launch.prefill_kv_tokens)
    decode = launch.decode_layout(spec).num_blocks_for(launch.decode_kv_tokens)
    end = time.monotonic() + _IDLE_S
    while True:
        pools = pools_of(engine)
        wrong = {
            pool: states
            for pool, states in pools.items()
            for size in [(prefill if is_prefill(pool) else decode)[pool[1]]]
            if states["free"] + states.get("cached", 0) != size
            or any(n for state, n in states.items() if state not in ("free", "cached"))
        }
        if not wrong:
            return pools
        if time.monotonic() > end:
            raise KvflowError(f"blocks are missing or held: {wrong}")
        await asyncio.sleep(0.05)


# --- what is printed


def print_turns(played: Mapping[str, Played], seconds: float) -> None:
    """A line a turn, and one for all."""
    print(f"\n{'turn':12} {'extends':12} {'prompt':>6} {'cached':>6} {'new':>5} {'out':>4} "
          f"{'TTFT s':>7} {'all s':>7}")  # fmt: skip
    for name, one in played.items():
        size, before = len(one.prompt), one.turn.extends or "-"
        print(f"{name:12} {before:12} {size:6} {one.cached:6} {size - one.cached:5} "
              f"{len(one.tokens):4} {one.ttft:7.2f} {one.seconds:7.2f}")  # fmt: skip
    tokens = sum(len(one.tokens) for one in played.values())
    print(f"{len(played)} turns of {len({one.turn.agent for one in played.values()})} agents, "
          f"{tokens} tokens, {seconds:.1f} s")  # fmt: skip


def print_tiers(engine: EngineClient, played: Mapping[str, Played]) -> None:
    """What was reused of the prompts, and what could have been at the granularity of one token."""
    tiers = by_tier(engine)
    total = sum(len(one.prompt) for one in played.values())
    shared = sum(one.turn.shared for one in played.values())
    reused = sum(one.cached for one in played.values())
    hits = ", ".join(f"{tier} {num}" for tier, num in tiers.items())
    print(f"prefix hits by tier, in tokens: {hits}")
    print(f"of {total} prompt tokens {shared} begin like an earlier turn, {reused} were not "
          f"computed again: {reused / total:.1%}; decode groups had "
          f"{held_by_decode(engine)} of them")  # fmt: skip


def print_transfers(played: Mapping[str, Played]) -> bool:
    """Whether every transfer that was told of was verified."""
    reports = [one.transfer for one in played.values() if one.transfer is not None]
    verified = all(report.get("verified") is True for report in reports)
    nbytes = sum(report.get("nbytes", 0) for report in reports)
    print(f"transfers: {len(reports)} for {len(played)} turns, {nbytes:,} bytes, "
          f"{'every byte equals its source' if verified else 'NOT VERIFIED'}")  # fmt: skip
    return verified

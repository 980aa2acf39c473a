"""Plays a drawn scene, compares every request with itself alone, and counts what happened."""

import asyncio
import contextlib
import functools
from collections import Counter
from unittest import mock

import torch
from attrs import evolve
from engine_scenes import VOCAB
from engine_world import assert_nothing_in_flight, one_rank_sampled, until, world

from kvflow.engine.api import Request
from kvflow.engine.spec.draft import Drafter

HELD = ("used_blocks", "pinned_blocks", "quarantined_blocks")
NUM_LOGPROBS = 3
LOGPROB_ERROR = 1e-9
"""Ranks add up in another order than one alone; in float64 that shows in the last places only.
Tokens are compared exactly."""


@functools.lru_cache(maxsize=256)
def _alone(prompt, sampling, kv_dtype):
    return tuple(one_rank_sampled(Request("alone", prompt, sampling), kv_dtype))


def alone(request, kv_dtype):
    """What a request samples by itself on one rank, log-probabilities included."""
    plain = evolve(request.sampling, num_logprobs=NUM_LOGPROBS, stop_token_ids=())
    return _alone(request.prompt, plain, kv_dtype)


def settled(scene):
    """The scene with the tokens that stop requests in place of their indices, and the prompts of
    turns that follow others whole."""
    done: dict[str, object] = {}
    waves = tuple(tuple(_settled(scene, a, done) for a in wave) for wave in scene.waves)
    return evolve(scene, waves=waves)


def _settled(scene, arrival, done):
    if arrival.follows is not None:
        before = done[arrival.follows.request.request_id]
        said = [s.token for s in expected(scene, before)[0]]
        prompt = (*before.request.prompt, *said, *arrival.request.prompt)
        arrival = evolve(arrival, request=evolve(arrival.request, prompt=prompt))
    arrival = done[arrival.request.request_id] = _stopped(scene, arrival)
    return arrival


def _stopped(scene, arrival):
    request, at = arrival.request, arrival.stop_at
    tokens = [s.token for s in alone(request, scene.launch.kv_dtype)]
    if at is None or at >= len(tokens):
        return arrival
    sampling = evolve(request.sampling, stop_token_ids=(tokens[at],))
    return evolve(arrival, request=evolve(request, sampling=sampling))


def expected(scene, arrival):
    """What the client should get, and the reason in the last output; None if it leaves before."""
    request = arrival.request
    whole = list(alone(request, scene.launch.kv_dtype))
    stops = [i for i, s in enumerate(whole) if s.token in request.sampling.stop_token_ids]
    reason = "stop" if stops else "length"
    whole = whole[: stops[0] + 1] if stops else whole
    if arrival.cancel_after is not None and arrival.cancel_after < len(whole):
        return whole[: arrival.cancel_after], None
    return whole, reason


class TruthfulDrafter(Drafter):
    """Runs the MTP passes, with all that they write, and then drafts what comes true in some
    places and not in others. `truth` is by request, from position 0 on."""

    truth: dict[str, list[int]]
    right_of_8: int

    def draft(self, items, passes, kept):
        drafts = super().draft(items, passes, kept)
        return {i: self._said(items[i], len(tokens)) for i, tokens in drafts.items()}

    def _said(self, item, count):
        truth = self.truth[item.request_id.rpartition("#")[0]]
        said = []
        for position in range(item.stop, item.stop + count):
            right = position < len(truth) and position * 5 % 8 < self.right_of_8
            said.append(truth[position] if right else (position * 7 + 1) % VOCAB)
        return torch.tensor(said)


@contextlib.contextmanager
def drafting(scene):
    """Every runner that is made meanwhile drafts as the scene says."""
    if scene.right_of_8 is None:
        yield
        return
    requests = [a.request for wave in scene.waves for a in wave]
    truth = {
        r.request_id: [*r.prompt, *(s.token for s in alone(r, scene.launch.kv_dtype))]
        for r in requests
    }
    members = {"truth": truth, "right_of_8": scene.right_of_8}
    with mock.patch("kvflow.engine.runner.Drafter", type("Told", (TruthfulDrafter,), members)):
        yield


async def _served(deployment, arrival):
    got = []
    async with contextlib.aclosing(deployment.generate(arrival.request)) as outputs:
        async for output in outputs:
            got.append(output)
            if len(got) == arrival.cancel_after:
                break
    return arrival.request.request_id, got


async def _waves(launch, waves):
    got = {}
    async with world(launch) as deployment:
        for wave in waves:
            got.update(await asyncio.gather(*(_served(deployment, a) for a in wave)))
        await _idle(deployment)
        return got, _happened(deployment)


async def _idle(deployment):
    """Every block is free, or a prefix that can be evicted, on both sides."""
    for engine in deployment.prefills.values():
        for pool in engine.pools.values():
            await until(lambda p=pool: p.num_available == p.num_blocks)
        engine.audit()
    await until(lambda: not any(_held(deployment, rank) for rank in deployment.decode_ranks))
    await assert_nothing_in_flight(deployment)


def _held(deployment, rank):
    """Blocks that a decode group still holds, as it last said."""
    gauges = deployment.gauges.get(rank, {})
    return [n for name, n in gauges.items() if name.split(".")[0] in HELD and n]


def _happened(deployment):
    """Reused tokens by tier, preemptions, accepted drafts, and clients that left."""
    happened = Counter()
    for engine in deployment.prefills.values():
        happened.update({f"{t} hits": n for t, n in engine.kv.num_reused.items()})
    happened["cancellations"] = deployment.num_requests["aborted"]
    for rank in deployment.decode_ranks:
        counters = deployment.counters.get(rank, {})
        for name in ("preemptions", "reused_tokens", "local_prefills"):
            happened[name] += int(counters.get(name, 0))
        for tier in ("host", "disk"):
            happened["restored_tokens"] += int(counters.get(f"restored_{tier}_tokens", 0))
        parts = counters.get("transfer_parts", 0) - counters.get("transfers", 0)
        happened["streamed parts"] += int(parts)
        accepted = [n for k, n in counters.items() if k.endswith("spec_accepted_tokens")]
        happened["accepted drafts"] += int(sum(accepted))
    return happened


def play(scene):
    """Serves the scene and checks every request; counts what happened, and the options under
    which requests were preempted and drafts accepted."""
    scene = settled(scene)
    with drafting(scene):
        if scene.stored_by is not None:
            asyncio.run(_waves(scene.stored_by, scene.waves[:1]))
        got, happened = asyncio.run(_waves(scene.launch, scene.waves))
    for arrival in (a for wave in scene.waves for a in wave):
        assert_right(scene, arrival, got[arrival.request.request_id])
        happened["stops"] += got[arrival.request.request_id][-1].finish_reason == "stop"
    launch = scene.launch
    ways = {"HiSparse": launch.hisparse, "DCP": launch.decode_dcp > 1, "TP": launch.decode_tp > 1}
    for event in ("preemptions", "accepted drafts"):
        for way in (way for way, on in ways.items() if on):
            happened[f"{event} with {way}"] += happened[event]
    if happened["preemptions"]:
        happened["accepted drafts with preemptions"] += happened["accepted drafts"]
    return happened


def assert_right(scene, arrival, got):
    """The client has the tokens of one rank alone, up to where they stop or it leaves."""
    want, reason = expected(scene, arrival)
    name, prompt = arrival.request.request_id, arrival.request.prompt
    assert [o.token for o in got] == [s.token for s in want], name
    assert [o.position for o in got] == [len(prompt) + i for i in range(len(want))], name
    assert [o.finish_reason for o in got] == [None] * (len(want) - 1) + [reason], name
    count = arrival.request.sampling.num_logprobs
    for output, sampled in zip(got, want, strict=True):
        if count is None:
            assert (output.logprob, output.top_logprobs) == (None, ()), name
            continue
        assert abs(output.logprob - sampled.logprob) < LOGPROB_ERROR, name
        best = sampled.top_logprobs[:count]
        assert [i for i, _ in output.top_logprobs] == [i for i, _ in best], name
        for (_, mine), (_, theirs) in zip(output.top_logprobs, best, strict=True):
            assert abs(mine - theirs) < LOGPROB_ERROR, name

"""The agent session of `serve_glm.py --session`: at full rank counts in processes (slow), and the
same session on a small deployment of threads."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest
from attrs import evolve
from launch_world import ROOT, SERVE, config, ranks_of

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import KvflowError
from kvflow.launch.threads import thread_deployment
from kvflow.server import load_tokenizer

sys.path.append(str(ROOT / "examples"))

import agent_session
from agent_session import (
    Played,
    audit,
    by_tier,
    check_session,
    pools_of,
    run_session,
    turns_that_differ,
)
from session_turns import MIN_ANSWER, Session, Turn, load_session

SESSION = ROOT / "examples" / "sessions" / "weka_0277.json"
HOST_NBYTES = 40_000
"""About 15 units of 4 tokens of the fixture model: a host tier that overflows into files."""


def small(model, tmp_path):
    """Every feature of the article's preset, at small sizes, and a disk tier."""
    tiers = PrefixConfig(True, 4, HOST_NBYTES, tmp_path / "tier", 1 << 26)
    values = {"pcp": 2, "dcp": 2, "decode_ranks": 2, "num_drafts": 3, "hisparse": True}
    sizes = {"max_model_len": 192, "prefill_kv_tokens": 192, "decode_kv_tokens": 512}
    blocks = {"prefill_block": 4, "decode_block": 8, "max_num_batched_tokens": 96}
    launch = config(**values, **sizes, **blocks, kv_dtype="fp8", dtype="float64", prefix=tiers)
    return evolve(launch, model=model, transport="in-process")


def test_an_agent_session_on_a_small_deployment(model, tmp_path, capsys, monkeypatch):
    """Same tokens as one rank alone, hits in every tier, clean pools."""
    launch = small(model, tmp_path)
    session = load_session(SESSION, launch, load_tokenizer(model))

    async def run():
        async with thread_deployment(launch) as engine:
            played, clean = await run_session(engine, launch, session)
            tiers = by_tier(engine)
            await _planted_losses_are_seen(engine, launch, monkeypatch)
        return played, clean, tiers, await check_session(launch, session, played)

    played, clean, tiers, same = asyncio.run(run())
    said = capsys.readouterr().out
    assert clean, said
    assert same, said
    assert list(played) == [turn.name for turn in session.turns]
    assert sum(tiers.values()) == sum(one.cached for one in played.values())
    assert min(tiers[tier] for tier in ("device", "host", "disk")) > 0, tiers
    (line,) = [line for line in said.splitlines() if line.startswith("prefix hits by tier")]
    assert all(f"{tier} {number}" in line for tier, number in tiers.items())


async def _planted_losses_are_seen(engine, launch, monkeypatch):
    """A block that is missing or held, on either side."""
    monkeypatch.setattr(agent_session, "_IDLE_S", 0.0)
    true = pools_of(engine)
    assert await audit(engine, launch) == true
    for pool in true:
        for state, change in (("free", -1), ("free", 1), ("used", 1), ("quarantined", 1)):
            told = {**true, pool: {**true[pool], state: true[pool][state] + change}}
            with monkeypatch.context() as patch:
                patch.setattr(agent_session, "pools_of", lambda _, told=told: told)
                with pytest.raises(KvflowError, match=f"missing or held.*{pool[1]}"):
                    await audit(engine, launch)


def test_another_token_is_seen():
    one = Played(Turn("a/0", None, 0, (), 2, 2), (1, 2), (3, 4), 0, 0.0, 0.0, None)
    assert turns_that_differ({"a/0": one}, {"a/0": evolve(one, cached=1, ttft=2.0)}) == []
    for other in (evolve(one, tokens=(3, 5)), evolve(one, prompt=(1, 1)), evolve(one, tokens=(3,))):
        assert turns_that_differ({"a/0": one}, {"a/0": other}) == ["a/0"]


# --- the session itself


def trace_turns():
    return {turn["name"]: turn for turn in json.loads(SESSION.read_text())["turns"]}


@pytest.mark.parametrize("max_model_len", [192, 320, 2048, 92_973])
def test_a_scaled_session_keeps_its_structure(max_model_len):
    told = trace_turns()
    turns = {turn.name: turn for turn in Session.load(SESSION).scaled(max_model_len).turns}
    longest = max(t.prompt_size + t.max_tokens for t in turns.values())
    assert max_model_len - 8 <= longest <= max_model_len
    for name, turn in turns.items():
        original, ratio = told[name], max_model_len / 92_973
        assert (turn.extends, list(turn.after)) == (original["extends"], original["after"])
        # answers of at least MIN_ANSWER make short sessions longer
        for size, key in ((turn.prompt_size, "in"), (turn.shared, "shared")):
            assert -8 <= size - original[key] * ratio <= 4 * MIN_ANSWER
        assert turn.shared < turn.prompt_size
        assert turn.max_tokens in {MIN_ANSWER, *range(int(original["out"] * ratio) + 1)}
        if turn.extends:
            before, original_before = turns[turn.extends], told[turn.extends]
            end = before.prompt_size + before.max_tokens
            whole = original["shared"] == original_before["in"] + original_before["out"]
            assert turn.shared == end if whole else turn.shared <= end


def test_turns_wait_for_what_they_continue():
    """Whoever continues an answer begins after it; sub-agents begin together."""
    told = trace_turns()
    for turn in told.values():
        before = told.get(turn["extends"])
        if before is not None and turn["shared"] > before["in"]:
            assert turn["after"] == [before["name"]] or turn["name"] in ("main/1", "main/7")
    assert {n for n, t in told.items() if t["after"] == ["main/0"]} == {
        f"agent_00{i}/0" for i in (1, 2, 3)
    }


def test_files_that_hold_no_session_are_refused(tmp_path, model):
    launch, tokenizer = small(model, tmp_path), load_tokenizer(model)
    path = tmp_path / "session.json"
    for text in ("{", "[]", '{"turns": []}', '{"turns": [{"name": 1}], "text": {}}'):
        path.write_text(text)
        with pytest.raises(KvflowError, match=r"session\.json holds no session"):
            load_session(path, launch, tokenizer)
    with pytest.raises(KvflowError, match="max_model_len = 16 is too short for the session"):
        Session.load(SESSION).scaled(16)
    with pytest.raises(KvflowError, match=r"turn main/0 adds \d+ tokens, its text has \d+"):
        Session.load(SESSION).scaled(10**6).with_texts(tokenizer)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_the_article_completes_an_agent_session_in_processes(tmp_path):
    """16 ranks and a front; and a disk tier, over the preset."""
    flags = ["--preset", "article", "--session", str(SESSION), "--host-tier-gib", "0.004"]
    flags += ["--disk-tier-gib", "1", "--disk-tier-directory", str(tmp_path / "tier")]
    done = subprocess.run(
        [sys.executable, str(SERVE), *flags],
        capture_output=True,
        text=True,
        timeout=1700,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "24 turns of 5 agents" in said
    assert "every byte equals its source" in said
    assert "prefill engines keep none" in said
    assert "one rank alone computes the same tokens" in said
    told = re.search(r"prefix hits by tier, in tokens: (.*)", said)
    tiers = dict(pair.split() for pair in told[1].split(", "))
    assert set(tiers) == {"device", "host", "disk", "peer"}
    assert int(tiers["device"]) > 0
    assert int(tiers["disk"]) > 0, said  # the host tier is too small for the agent that waits
    assert ranks_of(os.getpid()) == []
    print(said)

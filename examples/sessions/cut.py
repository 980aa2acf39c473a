"""Cuts a session out of a trace of callanjfox/kv-cache-tester (Apache-2.0), for `serve_glm.py
--session`: which prompt begins like which other, how long each is, who waits for whom.

    python examples/sessions/cut.py trace_0277.json agent_001=4 agent_002=4 agent_003=4 agent_004=3

The numbers keep the first turns of each sub-agent; the main agent's turns are all kept. Texts are
not in a trace: equal block ids at equal positions mean equal texts, and nothing more is known.
"""

import json
import sys
from pathlib import Path

ABOUT = (
    "An agent with sub-agents, cut from a trace of a real one. A turn's prompt is `shared` tokens "
    "of the prompt and answer of the turn that it `extends`, then new text; all lengths are in the "
    "trace's tokens. A turn begins when those of `after` have ended. `text`: the modules of "
    "Python's standard library whose source is each agent's new text, read where it is played."
)
MODULES = ("argparse", "difflib", "configparser", "optparse", "inspect", "tarfile")


def turns_of(trace, kept):
    """The turns in order of their beginnings."""
    found, blocks, parts = [], {}, []
    waits = []  # what the main agent's next turn begins after
    for entry in trace["requests"]:
        if entry["type"] == "subagent":
            # `t` of a sub-agent is its end: it began when the last turn of its parent had ended
            agent, inner = entry["agent_id"], entry["requests"]
            chain, _ = _chain(agent, inner[: kept.get(agent, len(inner))], parts, blocks)
            found += chain
            waits.append(chain[-1]["name"])
            continue
        chain, name = _chain("main", [entry], waits or parts, blocks, len(_of(found, "main")))
        found += chain
        parts, waits = [name], []
    return found


def _of(found, agent):
    return [turn for turn in found if turn["name"].startswith(agent + "/")]


def _chain(agent, requests, after, blocks, first=0):
    """Turns of one agent, one after the other; the name of the last one."""
    chain, before = [], list(after)
    for i, request in enumerate(requests, first):
        name, ids = f"{agent}/{i}", request["hash_ids"]
        extends, shared = _longest(ids, blocks)
        turn = {"name": name, "extends": extends, "shared": shared * 64, "after": before}
        turn |= {"in": request["in"], "out": request["out"]}
        if extends == f"{agent}/{i - 1}":
            turn["shared"] = _with_answer(request["in"], *blocks[extends][1:])
        blocks[name] = ids, request["in"], request["out"]
        chain.append(turn)
        before = [name]
    return chain, before[0]


def _longest(ids, blocks):
    """The turn whose prompt has the longest common beginning, and its length in blocks."""
    best = None, 0
    for name, (other, *_) in blocks.items():
        same = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
        same = min(len(ids), len(other)) if same is None else same
        if same > best[1]:
            best = name, same
    return best


def _with_answer(size, before, answer):
    """A next turn holds the prompt and the answer before it. Where that leaves no room for what the
    turn adds, thinking was dropped from the answer: it keeps as much as half of the growth."""
    return before + (answer if before + answer < size else (size - before) // 2)


def main(path, *counts):
    """Writes the session to the standard output."""
    trace = json.loads(Path(path).read_text())
    kept = {agent: int(n) for agent, n in (word.split("=") for word in counts)}
    source = {
        "repository": "callanjfox/kv-cache-tester",
        "file": Path(path).name,
        "licence": "Apache-2.0, LICENSE-weka-apache-2.0",
        "changes": "reduced to lengths and prefixes; of the sub-agents' turns these are kept: "
        + ", ".join(counts),
    }
    found = turns_of(trace, kept)
    agents = dict.fromkeys(turn["name"].split("/")[0] for turn in found)
    text = dict(zip(agents, MODULES, strict=False))
    turns = ",\n  ".join(map(json.dumps, found))
    head = json.dumps({"about": ABOUT, "source": source, "text": text}, indent=1)[:-2]
    print(f'{head},\n "turns": [\n  {turns}\n ]\n}}')


if __name__ == "__main__":
    main(*sys.argv[1:])

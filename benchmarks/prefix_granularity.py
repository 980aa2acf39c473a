"""What a prefix cache recomputes on real agent sessions when hits are rounded down to whole units.

    python benchmarks/prefix_granularity.py --traces weka_cc_even.jsonl.gz

Reads anonymised sessions (one JSON object a line, ids of 64-token blocks per request, each id list
given as a change of an earlier one; see docs/prefix-cache.md). Every request of a session can reuse
what any earlier request of the session shares with it, from a cache that forgets nothing. Prints
the tokens that are computed at each unit, and their ratio to 64 tokens. Nothing is timed.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 64
UNITS = (64, 128, 256, 512)


def requests_of(session: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The requests of a session depth-first, those of sub-agents in place."""
    for request in session["requests"]:
        if request.get("type") == "subagent":
            yield from requests_of(request)
        else:
            yield request


def block_ids(requests: list[dict[str, Any]]) -> list[list[int]]:
    """Each request's block ids: the first `lcp` of an earlier list, then runs of integers."""
    lists: list[list[int]] = []
    for request in requests:
        ref, lcp, runs = request["h"]
        ids = list(lists[ref][:lcp]) if ref >= 0 else []
        for start, count in runs:
            ids.extend(range(start, start + count))
        lists.append(ids)
    return lists


def computed(prompt: int, shared_blocks: int, unit: int) -> int:
    """Tokens computed of a prompt that shares whole blocks with an earlier one: the last token
    always is."""
    hit = min(shared_blocks * BLOCK, prompt - 1)
    return prompt - hit // unit * unit


def shared_blocks(requests: list[dict[str, Any]]) -> list[int]:
    """For each request the blocks it shares, from the first on, with the best earlier one: what a
    trie of all earlier lists gives."""
    trie: dict[int, Any] = {}
    shared = []
    for request, ids in zip(requests, block_ids(requests), strict=True):
        whole = ids[: request["in"] // BLOCK]
        node, depth = trie, 0
        while depth < len(whole) and whole[depth] in node:
            node, depth = node[whole[depth]], depth + 1
        shared.append(depth)
        for block in whole[depth:]:
            node = node.setdefault(block, {})
    return shared


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    totals, num_requests, prompts = dict.fromkeys(UNITS, 0), 0, 0
    with gzip.open(parser.parse_args().traces, "rt") as lines:
        for line in lines:
            requests = list(requests_of(json.loads(line)))
            for request, shared in zip(requests, shared_blocks(requests), strict=True):
                num_requests += 1
                prompts += request["in"]
                for unit in UNITS:
                    totals[unit] += computed(request["in"], shared, unit)
    print(f"{num_requests:,} requests, {prompts:,} prompt tokens")
    for unit, tokens in totals.items():
        share, ratio = tokens / prompts, tokens / totals[UNITS[0]]
        print(f"unit {unit:4}: {tokens:>13,} computed, {share:.2%} of prompts, {ratio:.4f} x")


if __name__ == "__main__":
    main()

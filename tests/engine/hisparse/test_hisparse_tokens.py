"""HiSparse decodes the tokens that pages of everything decode: logits are equal bit by bit."""

import pytest
import torch
from hisparse_world import (
    TEXTS,
    TOPK,
    Blocks,
    bare_step,
    best,
    greedy_tokens,
    hisparse_memory,
    paged_memory,
    prefilled,
    pulled,
    request_of,
    small_spec,
    step,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvflow.engine.hisparse import HiSparseSizes

torch.set_num_threads(1)
SPEC = small_spec()


def test_a_pulled_request_decodes_the_same_tokens():
    """Hot rows for one query alone; the last page that arrives is partly filled."""
    source = prefilled(203)
    wanted = greedy_tokens(source.blocks.memory, source.tables, source, 20)
    memory = hisparse_memory(HiSparseSizes(TOPK, 1, TOPK))
    _, tables = pulled(source, memory)
    assert greedy_tokens(memory, tables, source, 20) == wanted


def test_a_prompt_computed_here_gives_the_same_logits():
    """As after a preemption: parts of 24 tokens, more rows in a step than there are hot rows."""
    text, logits = TEXTS[3][:72], []
    for memory in (paged_memory(), hisparse_memory(HiSparseSizes(TOPK, 1, 2 * TOPK))):
        tables = Blocks(memory).take(len(text) + 1)
        parts = [("a", n, text[n : n + 24], tables) for n in range(0, len(text), 24)]
        logits.append(torch.cat([step(memory, [part])["a"] for part in parts]))
    assert torch.equal(*logits)


def test_several_requests_with_drafts_that_are_mostly_wrong():
    """Steps of four tokens of which one to four are kept, so that rows are written again."""
    source = prefilled(60, 37, 96)
    memory = hisparse_memory(HiSparseSizes.for_drafts(TOPK, 3, 3))
    sides = [(source.blocks.memory, source.tables), (memory, pulled(source, memory)[1])]
    runs = []
    for held, tables in sides:
        at, logits = {i: len(prompt) for i, prompt in source.prompts.items()}, []
        for n in range(6):
            items = [
                (i, start, [(13 * n + 7 * i + k) % 320 for k in range(4)], tables[i])
                for i, start in at.items()
                if (n + i) % 3
            ]
            logits += list(step(held, items).values())
            at |= {i: start + 1 + (n * (i + 1)) % 4 for i, start, _, _ in items}
        runs.append(logits)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert memory.counters["hits"] > memory.counters["misses"] > 0


def test_a_forgotten_requests_seat_serves_another():
    """One seat; each request in turn decodes what it decodes alone."""
    source = prefilled(60, 37, 96)
    memory = hisparse_memory(HiSparseSizes(TOPK, 1, TOPK), num_blocks=18)
    for name in source.prompts:
        wanted = greedy_tokens(source.blocks.memory, source.tables, source, 5, [name])
        _, tables = pulled(source, memory, [name], seed=name)
        assert greedy_tokens(memory, tables, source, 5, [name]) == wanted
        memory.forget(name)
        assert memory.num_free_seats == 1
    assert best(torch.eye(3)) == [0, 1, 2]


def test_a_step_that_broke_off_leaves_no_wrong_rows():
    """A follower never attended, so its hot rows are not those of its leader: all come anew."""
    runs = []
    for memory in (paged_memory(SPEC, 4, 16), hisparse_memory(HiSparseSizes(4, 1, 6), SPEC, 4, 16)):
        tables = Blocks(memory).take(60)
        bare_step(memory, [request_of("a", 0, 40, tables)], 4, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hisparse_world.index_groups", lambda spec: [("latent.0",)])
            bare_step(memory, [request_of("a", 40, 15, tables)], 4, 1)
        runs.append(bare_step(memory, [request_of("a", 40, 2, tables)], 4, 2))
    assert all(torch.equal(out, runs[1][name]) for name, out in runs[0].items())


@settings(max_examples=6, phases=[Phase.generate])
@given(
    hot_rows=st.sampled_from([TOPK, TOPK + 5, 5 * TOPK]),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 5)), max_size=3),
        min_size=3,
        max_size=6,
    ),
)
def test_logits_equal_those_of_pages(hot_rows, steps):
    """Each step some of three requests compute a few tokens, of which some are kept."""
    source = prefilled(60, 37, 96)
    memory = hisparse_memory(HiSparseSizes(TOPK, 3, hot_rows))
    sides = [(source.blocks.memory, source.tables), (memory, pulled(source, memory)[1])]
    at = {i: len(prompt) for i, prompt in source.prompts.items()}
    for n, parts in enumerate(steps):
        shares = {i: (count, min(kept, count)) for i, count, kept in parts}
        runs = []
        for held, tables in sides:
            items = [
                (i, at[i], [(31 * n + 7 * i + k) % 320 for k in range(count)], tables[i])
                for i, (count, _) in shares.items()
            ]
            runs.append(step(held, items) if items else {})
        assert all(torch.equal(logits, runs[1][i]) for i, logits in runs[0].items())
        for i, (_, kept) in shares.items():
            at[i] += kept

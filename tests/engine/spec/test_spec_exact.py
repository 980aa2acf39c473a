"""Tokens with drafts are the tokens without, whatever the drafts, the batch and the schedule."""

from attrs import frozen
from engine_world import one_rank_tokens, reference_model
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spec_world import VOCAB, differing, drive_all, layout_of, one_rank, scripts

from kvflow.engine.api import Request, SamplingParams

EXAMPLES = max(12, settings.default.max_examples // 15)


@frozen
class Scene:
    """Requests, by whom and how many drafts are tried, and what goes on meanwhile."""

    requests: tuple[Request, ...]
    script: str
    kv_dtype: str
    block: int
    drafts: tuple[int, ...]
    chunks: tuple[int, ...]
    preempted: frozenset[int]


@st.composite
def samplings(draw):
    """Greedy or seeded, up to 12 tokens."""
    return SamplingParams(
        draw(st.integers(1, 12)),
        draw(st.sampled_from([0, 0, 0.5, 1.0, 2.0])),
        draw(st.sampled_from([1.0, 0.9, 0.3])),
        draw(st.integers(0, 2**63 - 1)),
        ignore_eos=True,
    )


@st.composite
def scenes(draw):
    """Contexts on both sides of the 16 positions that attention chooses."""
    prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
    n = draw(st.integers(1, 3))
    return Scene(
        tuple(Request(f"r{i}", draw(prompts), draw(samplings())) for i in range(n)),
        draw(st.sampled_from(["right", "right", "wrong", "mixed", "random", "model"])),
        draw(st.sampled_from(["float64", "fp8"])),
        draw(st.integers(1, 9)),
        tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))),
        tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))),
        frozenset(draw(st.sets(st.integers(0, 30), max_size=3))),
    )


def run(scene):
    """The requests, driven to their ends; numbers of drafts and sizes of chunks go in turn."""
    layout = layout_of(reference_model(scene.kv_dtype, "float64").spec, scene.block)
    driven, num_blocks = drive_all(scene.requests, layout)
    script = scripts(scene.requests, scene.kv_dtype)[scene.script]
    runner = one_rank(scene.kv_dtype, scene.block, num_blocks, script)
    step = turn = 0
    while any(not d.done for d in driven):
        shares = {}
        for d in driven:
            if d.done:
                continue
            if step in scene.preempted and d.computed:
                runner.forget(d.request.request_id)
                d.computed = 0
            drafts = scene.drafts[turn % len(scene.drafts)]
            shares[d.request.request_id] = d, d.item(scene.chunks[turn % len(scene.chunks)], drafts)
            turn += 1
        emitted = runner.run([item for _, item in shares.values()])
        for name, (d, item) in shares.items():
            d.take(item, emitted.get(name, []))
            if d.done:
                runner.forget(name)
        step += 1
    assert len(runner._kept) == 0
    return driven, runner, layout, num_blocks


@given(scenes())
@settings(max_examples=EXAMPLES)
def test_drafts_change_no_token(scene):
    driven, runner, *_ = run(scene)
    accepted = sum(runner.counters.accepted.values())
    event(f"{scene.script}: {'some' if accepted else 'none'} accepted")
    if scene.script == "right":
        assert runner.counters.accepted == runner.counters.proposed
    if scene.script == "wrong":
        assert accepted == 0
    for d in driven:
        assert d.generated == one_rank_tokens(d.request, scene.kv_dtype)


@given(scenes())
@settings(max_examples=EXAMPLES)
def test_drafts_change_no_kv(scene):
    """Every byte of the committed positions, the MTP layer's included, equals a run in which every
    token was computed alone."""
    driven, runner, layout, num_blocks = run(scene)
    for d in driven:
        alone = Scene((d.request,), "model", scene.kv_dtype, scene.block, (0,), (1,), frozenset())
        (one,), reference, _, _ = run(alone)
        assert one.tokens == d.tokens
        assert one.computed >= d.computed == len(d.tokens) - 1
        caches = {0: runner.memory.cache}
        assert differing(d, layout, num_blocks, caches, reference.memory.cache) == []

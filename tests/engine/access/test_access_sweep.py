"""Any group, any way of reaching rows, any steps: what is chosen and attended to is what the
definition says, bit for bit what one rank computes where rows move."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_world import TOPK, Part, Raw, alone, oracle

from kvflow.engine.access import AccessOptions

EXAMPLES = max(20, settings.default.max_examples // 3)


def check(world, steps):
    """Against the oracle and, bit for bit, against one rank; calls alike; workspaces bounded."""
    found = world.run(steps)
    expected = oracle(steps, world.tp, world.heads)
    assert found.keys() == expected.keys()
    for key, (chosen, out) in expected.items():
        assert found[key][0][: len(chosen)] == chosen, key
        assert np.allclose(found[key][1], out, rtol=1e-12, atol=1e-12), key
    if moves_rows(world.options, steps):
        reference = alone(steps, world.tp, world.heads)
        assert all(np.array_equal(found[key][1], reference[key][1]) for key in expected)
    assert all(trace == world.traces[0] for trace in world.traces)
    assert all(peak <= limit for peak, limit in world.sizes)


def moves_rows(options, steps):
    """Whether rows come to the queries in every step: a context too long for a workspace does not
    move whole, and then what is cheapest may merge parts, whose last bits differ."""
    if options.attention != "whole":
        return options.attention == "union"
    return all(sum(p.start for p in parts) <= options.workspace_tokens for parts in steps)


@st.composite
def worlds(draw):
    pcp, tp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (3, 2)]))
    dcp = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6) if pcp * tp % d == 0]))
    options = AccessOptions(
        draw(st.sampled_from(["auto", "whole", "union", "queries"])),
        draw(st.sampled_from(["auto", "keys", "queries"])),
        draw(st.sampled_from([1 << 18, 40, 12, TOPK, 1])),
        draw(st.booleans()),
    )
    interleave, block = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    return Raw(pcp, tp, dcp, interleave, block, options, num_blocks=400)


@st.composite
def step_lists(draw, world):
    """Steps in which requests advance, begin, or stand still."""
    lengths = [draw(st.sampled_from([0, 0, 1, 3, 9, 20])) for _ in range(draw(st.integers(1, 3)))]
    steps = []
    first = [Part(i, 0, n) for i, n in enumerate(lengths) if n]
    if first:
        steps.append(tuple(first))
    for _ in range(draw(st.integers(1, 2))):
        parts = []
        for i, n in enumerate(lengths):
            new = draw(st.sampled_from([0, 1, 2, 4, 11]))
            if new:
                home = draw(st.sampled_from([None, *range(world.pcp)]))
                parts.append(Part(i, n, n + new, home))
                lengths[i] = n + new
        if parts:
            steps.append(tuple(parts))
    return tuple(steps) or ((Part(0, 0, 1),),)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_any_access_is_exact(data):
    world = data.draw(worlds())
    steps = data.draw(step_lists(world))
    check(world, steps)

"""However cached rows are reached, a step computes what one rank computes alone."""

import pytest
import torch
from access_world import Chunk, World, alone, tokens_of

from kvflow.engine.access import AccessOptions

STEPS = (
    (Chunk(0, 0, 30), Chunk(1, 0, 9)),
    (Chunk(0, 30, 70), Chunk(1, 9, 60), Chunk(2, 0, 2)),
    (Chunk(0, 70, 75), Chunk(1, 60, 61)),
)
WAYS = [("whole", "keys"), ("union", "queries"), ("queries", "keys"), ("auto", "auto")]


def check(world, steps):
    """Hidden states bit for bit where rows move, tokens where parts of attention do; the same
    calls on every rank; workspaces within their formula."""
    hidden, reference = world.run(steps), alone(steps, world.kv_dtype)
    assert hidden.keys() == reference.keys()
    if world.options.attention in ("whole", "union"):
        assert all(torch.equal(hidden[key], reference[key]) for key in reference)
    assert tokens_of(hidden, world.kv_dtype) == tokens_of(reference, world.kv_dtype)
    assert all(trace == world.traces[0] for trace in world.traces)
    for sizes in world.limits.values():
        assert all(peak <= limit for peak, limit in sizes), sizes


@pytest.mark.parametrize(("attention", "index"), WAYS)
@pytest.mark.parametrize(("pcp", "dcp", "tokens"), [(2, 2, 1 << 18), (4, 2, 400)])
def test_steps_equal_one_rank(pcp, dcp, attention, index, tokens):
    options = AccessOptions(attention, index, tokens, overlap=tokens == 400)
    check(World(pcp, dcp, 3, options=options), STEPS)

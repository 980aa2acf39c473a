"""The cost model: its bytes against what the collectives carry, and what it chooses."""

import pytest
from raw_world import SPEC, TOPK, Part, Raw

from kvflow.engine.access import AccessOptions
from kvflow.engine.access.choice import (
    AttentionShape,
    IndexShape,
    StepCounts,
    choose_attention,
    choose_index,
)
from kvflow.errors import LayoutError

GLM = AttentionShape(656, 64 * 576 * 2, 64 * 513 * 4, 2048, 79 / 22)
GLM_INDEX = IndexShape(132, 32 * 129 * 2, 8, 2048)
PLENTY = 1 << 30


def extend(new, cached, ranks=8):
    """One request of a long context, its new tokens dealt evenly."""
    counts = [[new // ranks + (r < new % ranks)] for r in range(ranks)]
    return StepCounts((cached,), (cached + new,), counts, ranks)


def decode(batch, cached, per_request=4, ranks=8):
    counts = [[per_request * (b % ranks == r) for b in range(batch)] for r in range(ranks)]
    return StepCounts((cached,) * batch, (cached + per_request,) * batch, counts, ranks)


@pytest.mark.parametrize("attention", ["whole", "union", "queries"])
@pytest.mark.parametrize("index", ["keys", "queries"])
def test_predicted_bytes_are_those_counted(attention, index):
    """Whole rows and queries to the byte; the union is an expectation of independent choices, and
    the drawn choices are many and equal by score, so it is only bounded."""
    world = Raw(4, 1, 4, options=AccessOptions(attention, index))
    world.run(((Part(0, 0, 40),), (Part(0, 40, 48),)))
    before = Raw(4, 1, 4, options=AccessOptions(attention, index))
    before.run(((Part(0, 0, 40),),))

    def counted(kinds):
        return sum(
            world.memories[r].counters.received_nbytes.get(kind, 0)
            - before.memories[r].counters.received_nbytes.get(kind, 0)
            for r in range(4)
            for kind in kinds
        )

    latent, key = SPEC["latent.0"].record.nbytes, SPEC["indexer.0"].record.nbytes
    step = StepCounts((40,), (48,), [[2]] * 4, 4)
    shape = AttentionShape(latent, 2 * 8 * 8, 2 * 7 * 8, TOPK, 5 / 3)
    one = IndexShape(key, 3 * 5 * 8, 12, TOPK)
    if attention == "whole":
        assert counted(["attention rows"]) == 5 * shape.nbytes("whole", step)
    elif attention == "union":
        assert 0 < counted(["attention rows"]) <= 5 * step.union(TOPK) * 1.5 * latent
    moved = (5 * shape.total_moved(step) if attention == "queries" else 0) + (
        3 * one.nbytes("queries", step) if index == "queries" else 0
    )
    assert counted(["queries", "partials"]) == moved
    if index == "keys":
        assert counted(["index keys"]) == 3 * one.nbytes("keys", step)


def test_short_extends_of_long_contexts_move_the_union():
    assert choose_attention(GLM, extend(64, 65_536), None, PLENTY) == "union"
    assert choose_attention(GLM, extend(713, 104_000), None, PLENTY) == "union"


def test_what_many_queries_choose_is_the_whole():
    assert choose_attention(GLM, extend(8192, 4096), None, PLENTY) == "whole"


def test_a_context_that_exceeds_the_workspace_does_not_move_whole():
    step = extend(8192, 65_536)
    assert choose_attention(GLM, step, "whole", 65_536) == "whole"
    assert choose_attention(GLM, step, "whole", 65_535) in ("union", "queries")


def test_few_index_queries_go_to_the_keys_and_many_do_not():
    assert choose_index(GLM_INDEX, extend(64, 1 << 20), None, PLENTY) == "queries"
    assert choose_index(GLM_INDEX, decode(8, 1 << 17), None, PLENTY) == "queries"
    assert choose_index(GLM_INDEX, extend(8192, 16_384), None, PLENTY) == "keys"


def test_what_is_asked_for_is_chosen():
    step = extend(64, 65_536)
    for way in ("whole", "union", "queries"):
        assert choose_attention(GLM, step, way, PLENTY) == way
    for way in ("keys", "queries"):
        assert choose_index(GLM_INDEX, step, way, PLENTY) == way


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "most"}, "attention is 'most', must be one of"),
        ({"index": "union"}, "index is 'union', must be one of"),
        ({"workspace_tokens": 0}, "workspace_tokens is 0, must be at least 1"),
    ],
)
def test_options_that_do_not_exist_are_refused(values, message):
    with pytest.raises(LayoutError, match=message):
        AccessOptions(**values)

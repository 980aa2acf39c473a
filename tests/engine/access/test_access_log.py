"""What runs ahead of what, as the log of a step says, and the counters."""

import pytest
from access_world import Chunk, World
from raw_world import LAYERS, SPEC, Part, Raw

from kvflow.engine.access import AccessOptions
from kvflow.engine.access.order import LayerOrder
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec

STEPS = ((Part(0, 0, 30), Part(1, 0, 11)), (Part(0, 30, 40), Part(1, 11, 12)))


def last_log(world, rank=0):
    return world.memories[rank].log


def moments(log):
    return {(m.what, m.component): m.at for m in log.moments}


def fetches(log, kind):
    return {f.component: f.times for f in log.fetches if f.kind == kind}


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_contexts_are_fetched_a_layer_ahead(rank):
    """The gather of layer l + 1 is issued before the attention of layer l ends, and not before
    layer l is published: one ahead. It is waited for at its own layer's attention."""
    world = Raw(2, 1, 2, options=AccessOptions("whole", "keys"))
    world.run(STEPS)
    log = last_log(world, rank)
    at, times = moments(log), fetches(log, "attention rows")
    assert list(times) == [f"latent.{i}" for i, _ in LAYERS]
    for layer in range(1, len(LAYERS)):
        one = times[f"latent.{layer}"]
        assert at["publish", f"latent.{layer - 1}"] < one.issued
        assert one.issued < at["attended", f"latent.{layer - 1}"]
        assert at["attend", f"latent.{layer}"] <= one.waited_from
    keys = fetches(log, "index keys")
    assert tuple(keys) == SPEC.select(part="main", kind="indexer")
    for layer in (layer for layer, full in LAYERS if full and layer):
        assert keys[f"indexer.{layer}"].issued < at["attended", f"latent.{layer - 1}"]


def test_rows_of_followers_are_fetched_while_their_leader_computes():
    """Layers 1, 2 and 3 share a choice: what 2 and 3 need is known when 1 has chosen."""
    world = Raw(2, 1, 2, options=AccessOptions("union", "queries"))
    world.run(STEPS)
    log = last_log(world)
    at, times = moments(log), fetches(log, "attention rows")
    for layer, full in LAYERS:
        one = times[f"latent.{layer}"]
        if full:
            assert one.issued >= at["attend", f"latent.{layer}"]
        else:
            assert one.issued < at["attended", f"latent.{layer - 1}"]


def test_which_layer_follows_which():
    """Also of a model without MTP layers, and of these alone."""
    order = LayerOrder(KVCacheSpec.from_config(dict(GLM_5_3, num_nextn_predict_layers=0)))
    assert order.after("latent.77") is None
    assert order.indexer("latent.74") == "indexer.74"
    assert (order.sharing("latent.74"), order.sharing("latent.77")) == ("latent.75", None)
    assert order.sharing("latent.73") is None
    assert order.layers_per_choice == 78 / 21
    order = LayerOrder(SPEC)
    assert order.after("latent.4") is None
    assert order.after("latent.5") is None
    assert (
        LayerOrder(KVCacheSpec(map(SPEC.__getitem__, SPEC.select(part="mtp")))).layers_per_choice
        == 0
    )


def test_without_overlap_nothing_is_fetched_early():
    world = Raw(2, 1, 2, options=AccessOptions("whole", "keys", overlap=False))
    world.run(STEPS)
    log = last_log(world)
    at = moments(log)
    for component, times in fetches(log, "attention rows").items():
        assert times.issued >= at["attend", component]
        assert times.waited_from >= times.ended


def test_workspaces_without_overlap_take_half():
    peaks = {}
    for overlap in (True, False):
        world = Raw(2, 1, 2, options=AccessOptions("whole", "keys", overlap=overlap))
        world.run(STEPS)
        peaks[overlap] = world.memories[0].workspace_nbytes
    rows = {name: SPEC[name].record.nbytes for name in SPEC.names}
    new, cached, deep = 11, 41, 2
    fresh = new * (rows["latent.0"] + rows["indexer.0"])
    assert peaks[False] == fresh + cached * rows["latent.0"]
    assert peaks[True] == fresh + cached * (deep * rows["latent.0"] + rows["indexer.0"])


def test_bytes_of_every_way_are_counted():
    """By hand: 2 ranks, one request of 8 cached and 4 new tokens, top-k 5, float64 rows."""
    steps = ((Part(0, 0, 8),), (Part(0, 8, 12),))
    latent, key = SPEC["latent.0"].record.nbytes, SPEC["indexer.0"].record.nbytes
    base = None
    for options in (AccessOptions("whole", "keys"), AccessOptions("queries", "queries")):
        world = Raw(2, 1, 2, options=options)
        world.run(steps)
        received = dict(world.memories[0].counters.received_nbytes)
        new = received.pop("new rows")
        assert base in (None, new)
        base = new
        if options.attention == "whole":
            # of the second step: the other rank's 4 cached rows in 5 layers and 3 indexers; of the
            # first nothing is cached
            assert received == {"attention rows": 5 * 4 * latent, "index keys": 3 * 4 * key}
        else:
            # the other rank's 4, then 2 queries in each of 5 layers, 2 heads of 8 doubles; and as
            # many answers of 6 + 1 to this rank's. Of 3 indexers, 3 heads of 4 + 1 doubles: at
            # rank 1 position 5 (chunks 0 1 1 0), then all positions.
            assert received["queries"] >= 5 * (4 + 2) * 2 * 8 * 8
            assert received["partials"] >= 5 * (4 + 2) * 2 * 7 * 8
    # 6 latent and 4 indexer components, the other rank's 4 and 2 new rows
    assert base == (4 + 2) * (6 * latent + 4 * key)


def test_the_model_counts_bytes_and_workspaces():
    world = World(2, 2)
    world.run(((Chunk(0, 0, 40),), (Chunk(0, 40, 44),)))
    counters = world.memories[1].counters
    assert counters.received_nbytes["new rows"] > 0
    assert set(counters.received_nbytes) == set(counters.num_collectives)
    assert 0 < counters.workspace_peak_nbytes == world.memories[1].workspace_nbytes
    assert counters.workspace_peak_nbytes <= counters.workspace_limit_nbytes
    assert counters.workspace_limit_nbytes == max(limit for _, limit in world.limits[1])
    assert set(counters.gauges()) == {"workspace_peak_nbytes", "workspace_limit_nbytes"}

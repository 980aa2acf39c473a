"""Entries of the catalogue: what they take for granted, and where a group of layers is full."""

from attrs import astuple, evolve

from kvflow.layouts.catalogue import Shape, entry
from kvflow.layouts.catalogue.vllm_host import resident_groups
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec


def test_a_shape_is_small_and_its_rows_are_those_of_glm():
    assert astuple(Shape()) == (2, 3, 32, 2, 32, "bfloat16", 512, 64, 128, None, 2, 1, 0)


def test_the_layers_of_glm_that_own_an_indexer_are_those_of_its_config():
    spec = KVCacheSpec.from_config(GLM_5_3)
    owners = tuple(spec[name].layer_id for name in spec.select(kind="indexer"))
    assert entry("vllm.hisparse_device").golden.shape.full_layers == owners


def test_an_entry_prints_alike_in_any_process():
    for name in ("vllm.hisparse_host", "vllm.indexer"):
        assert "function" not in repr(entry(name))


def test_bytes_are_rounded_only_where_an_entry_says_so():
    least = Shape(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", index_dim=1)
    odd = evolve(least, num_blocks=3, block_size=1)
    assert entry("vllm.flash_nhd").order(odd).nbytes == 2 * 3
    assert entry("vllm.indexer").order(odd).nbytes == 3 * (1 + 4)


def test_resident_pages_may_fill_the_room_beside_the_indexer_exactly():
    """Two indexer rows of 256 + 4 bytes leave room for two latent rows of 128 + 4 + 128."""
    shape = Shape(num_layers=2, latent_rank=128, rope_dim=64, index_dim=256)
    assert resident_groups(shape) == ((0, 1),)
    assert resident_groups(evolve(shape, rope_dim=65)) == ((0,), (1,))
    shared = evolve(shape, num_layers=4, full_layers=(1, 3), index_dim=380)
    assert resident_groups(shared) == ((0,), (1, 2), (3,))

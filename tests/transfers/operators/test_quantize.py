"""Quantize and Dequantize: bytes of the reference encoding, between any two layouts."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CONFIG, bound_to

from kvflow.errors import ContentMismatch, LayoutError, PlanError
from kvflow.kernels.codec import decode_index_key, decode_latent
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import (
    ConversionTags,
    LawError,
    bindings,
    check_operator,
    layouts,
    token_ranges,
)
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators import Dequantize, Pipeline, Quantize, bind

WIDE = CONFIG | {"kv_lora_rank": 130, "qk_rope_head_dim": 2}


@st.composite
def conversions(draw: st.DrawFn):
    """(plain side, fp8 side, tokens), any two layouts of one model."""
    tokens, plain = (
        draw(token_ranges(16)),
        draw(st.sampled_from(["bfloat16", "float32", "float64"])),
    )
    config = WIDE | {"kv_lora_rank": draw(st.sampled_from([3, 128, 130]))}
    sides = []
    for dtype in (plain, "fp8"):
        spec = KVCacheSpec.from_config(config, kv_dtype=dtype)
        sides.append(draw(bindings(draw(layouts(spec, tokens, max_shards=3)), tokens[1])))
    return *sides, tokens


@settings(max_examples=20)
@given(case=conversions(), seed=st.integers(0, 2**16))
def test_quantize_keeps_the_law(case, seed: int) -> None:
    plain, packed, tokens = case
    stage = Quantize(plain.layout, packed.layout)
    tags = ConversionTags(stage, seed)
    check_operator(stage, plain, packed, tokens, held=tags.held, wanted=tags.wanted)


@settings(max_examples=20)
@given(case=conversions(), seed=st.integers(0, 2**16))
def test_dequantize_keeps_the_law(case, seed: int) -> None:
    plain, packed, tokens = case
    stage = Dequantize(packed.layout, plain.layout)
    tags = ConversionTags(stage, seed)
    check_operator(stage, packed, plain, tokens, held=tags.held, wanted=tags.wanted)


def spec_of(dtype: str, **changes) -> KVCacheSpec:
    return KVCacheSpec.from_config(WIDE | changes, kv_dtype=dtype)


def dealt(spec: KVCacheSpec, num_ranks: int = 2) -> KVLayout:
    return KVLayout.uniform(spec, Placement.simple(RoundRobin(num_ranks)), Paged(4))


def whole(spec: KVCacheSpec, block_size: int = 8) -> KVLayout:
    return KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(block_size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_there_and_back_is_within_half_a_step(dtype: str) -> None:
    """e4m3 has three bits of mantissa: a step is an eighth of the power of two below the value, and
    2**-9 of the scale at least. Rope is rounded to bfloat16."""
    plain, packed = spec_of(dtype), spec_of("fp8")
    first, middle, last = dealt(plain), whole(packed), whole(plain, 16)
    pipeline = Pipeline([Quantize(first, middle), Dequantize(middle, last)])
    bound = [bound_to(side, 11) for side in (first, middle, last)]
    caches = [
        {r: RankCache.allocate(b.layout, r, b.num_blocks) for r in b.layout.ranks} for b in bound
    ]
    noise = torch.Generator().manual_seed(4)
    for name in plain.names:
        record = plain[name].record
        kind = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[
            dtype
        ]
        for rank, cache in caches[0].items():
            memory = cache.pages[name].memory
            x = torch.randn(memory.numel() // kind.itemsize, generator=noise).to(kind)
            memory.copy_(x.view(torch.uint8))
            del rank
        del record
    pipeline.run((0, 11), bound, caches)
    for name in plain.names:
        for token in range(11):
            before = _read(plain[name], caches[0][token % 2], bound[0], token // 2)
            after = _read(plain[name], caches[2][0], bound[2], token)
            split = len(before) if plain[name].kind == "indexer" else 130
            values = zip(before[:split].split(128), after[:split].split(128), strict=True)
            for want, got in values:
                scale = want.abs().max() / 448
                if plain[name].kind == "indexer":
                    scale = 2.0 ** torch.ceil(torch.log2(scale))
                step = 2.0 ** torch.floor(torch.log2((want / scale).abs())) / 8
                room = step.clamp_min(2.0**-9) * scale / 2 * (1 + 1e-5)
                if dtype == "bfloat16":  # a decoded value is rounded once more
                    room = room * (1 + 2**-7) + want.abs() * 2**-8
                assert bool(((got - want).abs() <= room).all())
            rope = after[split:] - before[split:]
            assert bool((rope.abs() <= before[split:].abs() * 2**-8).all())


def _read(component, cache: RankCache, bound, local: int) -> torch.Tensor:
    view, size = cache.pages[component.name], cache.pages[component.name].block_size
    block = int(bound.tables["kv"][local // size])
    row = view.memory[block * view.block_stride :][local % size * component.record.nbytes :]
    row = row[: component.record.nbytes]
    decode = decode_latent if component.kind == "latent" else decode_index_key
    return decode(component.record, row, torch.float64)


def test_the_law_is_seen_to_fail() -> None:
    stage = Quantize(dealt(spec_of("float32")), whole(spec_of("fp8")))
    tags, sides = (
        ConversionTags(stage),
        [bound_to(side, 9) for side in (stage.source, stage.target)],
    )

    def run(change) -> str:
        def spoiled(bound, sources, targets) -> None:
            stage.execute(bound, sources, targets)
            change(targets[0].pages)

        with pytest.raises(LawError) as refused:
            check_operator(stage, *sides, (2, 9), run=spoiled, held=tags.held, wanted=tags.wanted)
        return str(refused.value)

    row = stage.target.spec["latent.1"].record.nbytes
    assert "component latent.1, token 8, field latent" in run(
        lambda pages: pages["latent.1"].memory[:3].bitwise_xor_(1)
    )
    said = run(lambda pages: pages["latent.1"].memory[row : row + 1].bitwise_xor_(1))
    assert "which no claimed token owns" in said


def test_what_differs_in_more_than_the_dtypes_is_refused() -> None:
    plain, packed = whole(spec_of("float32")), whole(spec_of("fp8"))
    Quantize(plain, packed)
    eps = whole(KVCacheSpec.from_config(WIDE | {"rms_norm_eps": 1e-3}, kv_dtype="fp8"))
    with pytest.raises(ContentMismatch, match=r"'rms_norm_eps': source has None, target '0.001'"):
        Quantize(plain, eps)
    with pytest.raises(LayoutError, match=r"latent\.0: Quantize goes from"):
        Quantize(packed, plain)
    with pytest.raises(LayoutError, match=r"latent\.0: Dequantize goes from"):
        Dequantize(plain, packed)
    with pytest.raises(LayoutError, match="must be between floats and float8_e4m3fn"):
        Quantize(plain, whole(spec_of("float64")))
    with pytest.raises(LayoutError):
        Quantize(plain, whole(spec_of("fp8", kv_lora_rank=131)))
    with pytest.raises(LayoutError, match=r"rope|values"):
        Quantize(plain, whole(spec_of("fp8", qk_rope_head_dim=4)))


def test_a_component_that_no_codec_knows_is_refused() -> None:
    plain = KVCacheSpec.of_attention(1, num_heads=2, head_dim=4, kv_dtype="float32")
    packed = evolve(
        plain,
        components=KVCacheSpec.of_attention(
            1, num_heads=2, head_dim=4, kv_dtype="float8_e4m3fn"
        ).components,
    )
    with pytest.raises(LayoutError, match=r"key\.0: no codec for the kind 'key'"):
        Quantize(whole(plain), whole(packed))


def test_claims_limit_what_is_converted() -> None:
    names = spec_of("fp8").select(kind="indexer")
    stage = Quantize(dealt(spec_of("bfloat16")), whole(spec_of("fp8")), names)
    tags = ConversionTags(stage, 3)
    sides = [bound_to(side, 9) for side in (stage.source, stage.target)]
    check_operator(stage, *sides, (0, 9), held=tags.held, wanted=tags.wanted)


def test_nothing_is_converted_between_pages_of_another_layout() -> None:
    stage = Quantize(dealt(spec_of("float32")), whole(spec_of("fp8")))
    src, dst = bound_to(stage.source, 9), bound_to(stage.target, 9)
    bound = bind(stage, src, dst, (0, 9))

    def caches(layout: KVLayout, fill: int = 0) -> dict[int, RankCache]:
        return {r: RankCache.allocate(layout, r, {"kv": 64}, fill) for r in layout.ranks}

    sources, targets = caches(stage.source), caches(stage.target, 7)
    narrow = KVLayout.uniform(spec_of("float32"), stage.source.placement, Paged(2))
    for wrong, message in [
        (
            (caches(narrow), targets),
            "pages of 2 in the cache of source rank 0, the layout's have 4",
        ),
        ((caches(dealt(spec_of("float64"))), targets), "records .* source rank 0, the layout's"),
        ((sources, caches(whole(spec_of("fp8"), 4))), "pages of 4 .* target rank 0, .* have 8"),
        ((sources, caches(whole(spec_of("float32")))), "records .* target rank 0, the layout's"),
    ]:
        with pytest.raises(PlanError, match=message):
            stage.execute(bound, *wrong)
    assert all(bool((view.memory == 7).all()) for view in targets[0].pages.values())

"""The row codecs against a slow oracle in exact rationals, built from the definition of e4m3."""

import struct
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.kernels.codec import (
    decode_index_key,
    decode_latent,
    encode_index_key,
    encode_latent,
)
from kvflow.layouts.record import Field, Record, index_record, latent_record

torch.set_num_threads(1)
SHAPES = [(512, 64), (32, 8), (200, 6), (33, 5)]


def e4m3_value(code: int) -> Fraction:
    """Value of a code below 0x7f: 4 exponent bits of bias 7, 3 mantissa bits, subnormals."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) / 2**6
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]


def e4m3_code(x: Fraction, negative: bool) -> int:
    """Nearest code, ties to the even one, saturating."""
    x = min(abs(x), MAGNITUDES[-1])
    high = bisect_left(MAGNITUDES, x)
    low = max(high - 1, 0)
    up, down = MAGNITUDES[high] - x, x - MAGNITUDES[low]
    code = high if up < down or (up == down and high % 2 == 0) else low
    return code | (0x80 if negative else 0)


def f32(x: Fraction) -> Fraction:
    """Nearest float32: the quotient of two of them is never a tie, so two roundings are safe."""
    return Fraction(float(np.float32(float(x))))


def oracle_fp8(values: list[float], group: int, power_of_two: bool) -> bytes:
    codes, scales = [], []
    for start in range(0, len(values), group):
        part = values[start : start + group]
        amax = max(max(map(abs, part)), float(np.float32(1e-10)))
        if power_of_two:
            scale = Fraction(1, 2**60)
            while scale < Fraction(amax) / 448:
                scale *= 2
        else:
            scale = Fraction(float(np.float32(amax) / np.float32(448)))
        scales.append(float(scale))
        for v in part:
            negative = np.signbit(v)
            codes.append(e4m3_code(f32(Fraction(v) / scale), bool(negative)))
    return bytes(codes) + struct.pack(f"<{len(scales)}f", *scales)


def draw_rows(n, size, seed, spread=6.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=g)
    return x * 10.0 ** (torch.rand(n, 1, generator=g) * spread - spread / 2)


@pytest.mark.parametrize(("latent_rank", "rope_dim"), SHAPES)
def test_fp8_latent_rows_equal_the_oracle(latent_rank, rope_dim):
    record = latent_record("fp8", latent_rank=latent_rank, rope_dim=rope_dim)
    latent, rope = draw_rows(4, latent_rank, 1), draw_rows(4, rope_dim, 2)
    latent[1, ::3] = 0
    latent[2] = 0
    packed = encode_latent(record, latent, rope)
    for row, x, r in zip(packed, latent, rope, strict=True):
        expected = oracle_fp8(x.tolist(), 128, False)
        expected += b"".join(bf16_bytes(v) for v in r.tolist())
        expected += bytes(record.nbytes - len(expected))
        assert bytes(row.tolist()) == expected
        decoded = decode_latent(record, row).tolist()
        assert decoded[:latent_rank] == oracle_values(expected, latent_rank)
        assert decoded[latent_rank:] == r.bfloat16().tolist()


def oracle_values(row: bytes, size: int) -> list[float]:
    """code * scale, rounded to float32, of a row that starts with `size` codes."""
    groups = -(-size // 128)
    scales = struct.unpack(f"<{groups}f", row[size : size + 4 * groups])
    values = []
    for i, code in enumerate(row[:size]):
        value = f32(MAGNITUDES[code & 0x7F] * Fraction(scales[i // 128]))
        values.append(float(value) * (-1 if code & 0x80 else 1))
    return values


def bf16_bytes(x: float) -> bytes:
    """Round to nearest even on the upper half of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=8, max_size=8),
    st.booleans(),
)
def test_drawn_values_equal_the_oracle(values, as_key):
    x = torch.tensor([values], dtype=torch.float32)
    if as_key:
        packed = encode_index_key(index_record("fp8", index_dim=8), x)
        assert bytes(packed[0].tolist()) == oracle_fp8(x[0].tolist(), 8, True)
    else:
        record = latent_record("fp8", latent_rank=8, rope_dim=2)
        packed = encode_latent(record, x, torch.zeros(1, 2))
        assert bytes(packed[0, :12].tolist()) == oracle_fp8(x[0].tolist(), 8, False)


@pytest.mark.parametrize("index_dim", [128, 16, 7])
def test_fp8_index_keys_equal_the_oracle(index_dim):
    key = draw_rows(6, index_dim, 3)
    key[0] = 0
    packed = encode_index_key(index_record("fp8", index_dim=index_dim), key)
    for row, x in zip(packed, key, strict=True):
        assert bytes(row.tolist()) == oracle_fp8(x.tolist(), index_dim, True)


def test_power_of_two_scales_are_exact_at_their_borders():
    """448 * 2^e needs scale 2^e, the next float32 needs 2^(e+1): a rounded log2 misses this."""
    record = index_record("fp8", index_dim=4)
    for e in range(-30, 60):
        at = torch.tensor(448.0) * 2.0**e
        above = torch.nextafter(at, torch.tensor(torch.inf))
        packed = encode_index_key(record, torch.stack([at, above])[:, None].expand(2, 4))
        assert packed[:, 4:].contiguous().view(torch.float32)[:, 0].tolist() == [
            2.0**e,
            2.0 ** (e + 1),
        ]


def test_every_code_decodes_to_its_value():
    record = index_record("fp8", index_dim=256)
    row = torch.zeros(1, 260, dtype=torch.uint8)
    row[0, :256] = torch.arange(256, dtype=torch.uint8)
    row[0, 256:] = torch.tensor([0.5]).view(torch.uint8)
    values = decode_index_key(record, row)[0].tolist()
    for code, value in enumerate(values):
        if code & 0x7F == 0x7F:
            assert value != value
        else:
            sign = -1 if code & 0x80 else 1
            assert Fraction(value) == sign * MAGNITUDES[code & 0x7F] / 2


@pytest.mark.parametrize(("latent_rank", "rope_dim"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_plain_rows_hold_their_values(latent_rank, rope_dim, dtype):
    record = latent_record(dtype, latent_rank=latent_rank, rope_dim=rope_dim)
    of = getattr(torch, dtype)
    latent, rope = draw_rows(5, latent_rank, 4).to(of), draw_rows(5, rope_dim, 5).to(of)
    packed = encode_latent(record, latent, rope)
    raw = torch.cat([latent, rope], 1).view(torch.uint8)
    assert torch.equal(packed, raw)
    assert torch.equal(decode_latent(record, packed, of), torch.cat([latent, rope], 1))
    key = encode_index_key(index_record(dtype, index_dim=latent_rank), latent)
    assert torch.equal(key, latent.view(torch.uint8))
    assert torch.equal(
        decode_index_key(index_record(dtype, index_dim=latent_rank), key, of), latent
    )


@pytest.mark.parametrize(("latent_rank", "rope_dim"), SHAPES)
def test_rows_do_not_depend_on_their_batch(latent_rank, rope_dim):
    """More rows than a chunk holds, one at a time and all at once, poisoned neighbours included."""
    record = latent_record("fp8", latent_rank=latent_rank, rope_dim=rope_dim)
    latent, rope = draw_rows(530, latent_rank, 6), draw_rows(530, rope_dim, 7)
    latent[17, -1] = torch.nan
    rope[18, 1] = -torch.nan
    packed = encode_latent(record, latent, rope)
    decoded = decode_latent(record, packed)
    for i in [0, 16, 17, 18, 19, 255, 256, 511, 529]:
        alone = encode_latent(record, latent[i : i + 1], rope[i : i + 1])
        assert torch.equal(alone[0], packed[i])
        assert same(decode_latent(record, packed[i : i + 1])[0], decoded[i])
    order = torch.randperm(530, generator=torch.Generator().manual_seed(8))
    assert torch.equal(encode_latent(record, latent[order], rope[order]), packed[order])


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def test_any_leading_shape_and_any_view_decode_alike():
    record = latent_record("fp8", latent_rank=33, rope_dim=5)
    packed = encode_latent(record, draw_rows(12, 33, 9), draw_rows(12, 5, 10))
    expected = decode_latent(record, packed)
    assert torch.equal(decode_latent(record, packed.view(3, 2, 2, -1)), expected.view(3, 2, 2, -1))
    wide = torch.zeros(12, record.nbytes + 5, dtype=torch.uint8)
    wide[:, 3:-2] = packed
    assert torch.equal(decode_latent(record, wide[:, 3:-2]), expected)
    shifted = torch.zeros(packed.numel() + 1, dtype=torch.uint8)
    shifted[1:] = packed.view(-1)
    assert torch.equal(decode_latent(record, shifted[1:].view(12, -1)), expected)
    assert decode_latent(record, packed[:0]).shape == (0, 38)
    assert decode_latent(record, packed.view(3, 4, -1)[:, :0]).shape == (3, 0, 38)
    assert encode_latent(record, torch.zeros(0, 33), torch.zeros(0, 5)).shape == (0, record.nbytes)


def test_other_dtypes_round_the_float32_product():
    record = latent_record("fp8", latent_rank=200, rope_dim=6)
    packed = encode_latent(record, draw_rows(9, 200, 11), draw_rows(9, 6, 12))
    exact = decode_latent(record, packed, torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(decode_latent(record, packed, dtype), exact.to(dtype))


@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_value_poisons_its_group_and_nothing_else(poison):
    record = latent_record("fp8", latent_rank=512, rope_dim=64)
    latent, rope = draw_rows(300, 512, 13), draw_rows(300, 64, 14)
    clean = encode_latent(record, latent, rope)
    latent[7, 130] = poison
    packed = encode_latent(record, latent, rope)
    others = torch.arange(300) != 7
    assert torch.equal(packed[others], clean[others])
    assert (packed[7, 128:256] == 0x7F).all()
    assert packed[7, 516:520].tolist() == [0, 0, 0xC0, 0x7F]
    decoded, before = decode_latent(record, packed)[7], decode_latent(record, clean)[7]
    assert decoded[128:256].isnan().all()
    assert torch.equal(decoded[256:], before[256:])
    assert torch.equal(decoded[:128], before[:128])


@pytest.mark.parametrize("n", [1, 40])
def test_a_plain_nan_is_stored_as_one_quiet_nan(n):
    """torch's own cast writes another NaN in its vector loop than in its tail."""
    record = latent_record("fp8", latent_rank=32, rope_dim=33)
    rope = torch.full((n, 33), -torch.nan)
    rope[:, ::2] = torch.inf
    packed = encode_latent(record, torch.zeros(n, 32), rope)[:, 36:102].contiguous()
    bits = packed.view(torch.int16)
    assert (bits[:, ::2] == 0x7F80).all()
    assert (bits[:, 1::2] == 0x7FC0).all()


def test_gradients_and_input_are_left_alone():
    record = latent_record("fp8", latent_rank=32, rope_dim=8)
    latent, rope = draw_rows(3, 32, 15).requires_grad_(), draw_rows(3, 8, 16)
    kept = latent.detach().clone()
    assert not encode_latent(record, latent, rope).requires_grad
    assert torch.equal(latent.detach(), kept)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda r: encode_latent(r, torch.zeros(2, 31), torch.zeros(2, 8)), r"\[2, 31\].*32"),
        (lambda r: encode_latent(r, torch.zeros(2, 32), torch.zeros(2, 9)), r"\[2, 9\].*8"),
        (lambda r: encode_latent(r, torch.zeros(2, 32), torch.zeros(3, 8)), "2 latent.*3 rope"),
        (lambda r: encode_latent(r, torch.zeros(32), torch.zeros(8)), r"\[32\]"),
        (
            lambda r: encode_latent(r, torch.zeros(2, 32, dtype=torch.int32), torch.zeros(2, 8)),
            "int32",
        ),
        (lambda r: decode_latent(r, torch.zeros(2, 51, dtype=torch.uint8)), r"51.*52"),
        (lambda r: decode_latent(r, torch.zeros(2, 52)), "float32"),
        (lambda r: decode_latent(r, torch.zeros(2, 52, dtype=torch.uint8), torch.int8), "int8"),
        (lambda r: encode_index_key(r, torch.zeros(2, 32)), "key"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(LayoutError, match=match):
        call(latent_record("fp8", latent_rank=32, rope_dim=8))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ([Field("latent", "float8_e4m3fn", 200), Field("scale", "float32", 1)], "1 scales.*need 2"),
        ([Field("latent", "bfloat16", 32), Field("scale", "float32", 1)], "1 scales.*need 0"),
        ([Field("latent", "uint8", 32)], "uint8"),
        ([Field("latent", "float8_e4m3fn", 8), Field("scale", "bfloat16", 1)], "scale.*bfloat16"),
        ([Field("latent", "float32", 8), Field("extra", "uint8", 4)], "extra"),
    ],
)
def test_records_no_codec_writes_are_refused(fields, match):
    record = Record((*fields, Field("rope", "bfloat16", 8)))
    with pytest.raises(LayoutError, match=match):
        encode_latent(record, torch.zeros(1, fields[0].num_elements), torch.zeros(1, 8))

"""Quantize and Dequantize: between the float and the fp8 form of one cache, while it moves.

Both forms are layouts of one model whose content differs in its format alone (`FORMAT`). Bytes
follow `kvflow.kernels.codec`; rounding and values that are not finite: docs/decisions/0003.
"""

from collections.abc import Callable

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from kvflow.errors import ContentMismatch, LayoutError
from kvflow.kernels.codec import (
    decode_index_key,
    decode_latent,
    encode_index_key,
    encode_latent,
)
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.identity import FORMAT
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.record import Record
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.transfers.executors.base import check_pages_of, require_caches
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.protocol import Caches, Operator, check_bound, check_claims
from kvflow.transfers.operators.reassemble import copy_on_hosts

FP8 = "float8_e4m3fn"
_FLOATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
Convert = Callable[[Tensor], Tensor]
"""uint8 [n, bytes of a source row] -> uint8 [n, bytes of a target row]."""


def converter(source: Component, target: Component) -> Convert:
    """Rows of one form of a component to rows of the other, by the codec: decoded to the dtype of
    the plain side, encoded for the target. Raises `LayoutError` for a component no codec knows."""
    plain = source if _is_plain(source.record) else target
    dtype = _FLOATS[plain.record.fields[0].dtype]
    if source.kind == "latent":
        split = {f.name: f.num_elements for f in source.record.fields}["latent"]

        def latent(rows: Tensor) -> Tensor:
            values = decode_latent(source.record, rows, dtype)
            return encode_latent(target.record, values[:, :split], values[:, split:])

        return latent
    if source.kind == "indexer":
        return lambda rows: encode_index_key(
            target.record, decode_index_key(source.record, rows, dtype)
        )
    raise LayoutError(f"{source.name}: no codec for the kind {source.kind!r}")


def _is_plain(record: Record) -> bool:
    return all(f.dtype in _FLOATS for f in record.fields)


@frozen(eq=False)
class _Convert(Operator):
    """What the two directions share. The plan is that of the target's layout with the source's
    records: which token goes where does not depend on how a row is stored."""

    source: KVLayout
    target: KVLayout
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def _check(self, plain: KVLayout, packed: KVLayout) -> None:
        here, there = dict(self.source.spec.content), dict(self.target.spec.content)
        for key in sorted(here | there):
            if here.get(key) != there.get(key) and key not in FORMAT:
                raise ContentMismatch(
                    f"content field {key!r}: source has {here.get(key)!r}, target "
                    f"{there.get(key)!r}; only {list(FORMAT)} may differ"
                )
        check_claims(self)
        for name in self.components:
            a, b = self.source.spec[name], self.target.spec[name]
            if a.part != b.part:
                raise ContentMismatch(f"component {name}: source is {a.part}, target {b.part}")
            if not _is_plain(plain.spec[name].record) or _is_plain(packed.spec[name].record):
                raise LayoutError(
                    f"{name}: {type(self).__name__} goes from [{a.record}] to [{b.record}], "
                    f"must be between floats and {FP8}"
                )
            empty = torch.empty(0, a.record.nbytes, dtype=torch.uint8)
            converter(a, b)(empty)  # the codec refuses fields that do not fit

    @property
    def planned(self) -> tuple[KVLayout, KVLayout]:
        return self.source, evolve(self.target, spec=_as_stored(self.source, self.target))

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        check_bound(self, bound)
        require_caches(bound, sources, targets)
        written = evolve(bound.dst, layout=self.target)
        check_pages_of(bound.plan, bound.src, written, sources, targets)
        for dst_rank, target in targets.items():
            for part, src_rank, runs in bound.links_to(dst_rank):
                src, dst = (torch.from_numpy(slots) for slots in runs.expand())
                for name in part.components:
                    convert = converter(self.source.spec[name], self.target.spec[name])
                    rows = convert(gather_rows(sources[src_rank].pages[name], src))
                    scatter_rows(target.pages[name], dst, rows)
        copy_on_hosts(bound, targets)


def _as_stored(source: KVLayout, target: KVLayout) -> KVCacheSpec:
    """The target's spec with the content and the records of the source, where both have them."""
    components = tuple(
        evolve(c, record=source.spec[c.name].record) if c.name in source.spec.names else c
        for c in target.spec.components
    )
    return evolve(target.spec, components=components, content=source.spec.content)


@frozen(eq=False)
class Quantize(_Convert):
    """From a float format to fp8: any layout to any other of the same model.

    Law: the bytes of token t in the target are `encode_latent` and `encode_index_key` of its
    values in the source, bit for bit. Raises at construction `ContentMismatch` if more than the
    format differs, and `LayoutError` for other dtypes or fields."""

    def __attrs_post_init__(self) -> None:
        self._check(plain=self.source, packed=self.target)


@frozen(eq=False)
class Dequantize(_Convert):
    """From fp8 to a float format: any layout to any other of the same model.

    Law: the values of token t in the target are `decode_latent` and `decode_index_key` of its
    bytes in the source, rounded once to the target's dtype; behind a `Quantize` they are within
    half a quantisation step of what that read. Raises as `Quantize` does."""

    def __attrs_post_init__(self) -> None:
        self._check(plain=self.target, packed=self.source)

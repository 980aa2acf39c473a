"""Plans: which token goes from which rank and local index to which, as arithmetic runs.

A plan is a value. It knows no block ids and no addresses: those bind last, so one plan serves
every request of the same range between two peers. Runs live on the token axis and are shared by
all components of a part; bytes appear only when the plan is lowered.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from attrs import field, fields, frozen, has

from kvflow.errors import PlanError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.pieces import Heads
from kvflow.layouts.sharding import Ints, frozen_ints
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import integer, names, token_range, tuple_of


def _column(values: object) -> Ints:
    return frozen_ints(values)  # type: ignore[arg-type]


@frozen(eq=False)
class TransferRuns:
    """Run i moves `count[i]` tokens: token ``token + k*token_stride`` lies at local index
    ``src_local + k*src_stride`` of `src_rank` and goes to ``dst_local + k*dst_stride`` of
    `dst_rank`. Neither side of a run leaves its page. Columns are read-only int64 vectors of equal
    length: copies, but for arrays that own their memory and are read-only already."""

    src_rank: Ints = field(converter=_column)
    dst_rank: Ints = field(converter=_column)
    token: Ints = field(converter=_column)
    token_stride: Ints = field(converter=_column)
    src_local: Ints = field(converter=_column)
    src_stride: Ints = field(converter=_column)
    dst_local: Ints = field(converter=_column)
    dst_stride: Ints = field(converter=_column)
    count: Ints = field(converter=_column)

    def __attrs_post_init__(self) -> None:
        shapes = {column.shape for column in self.columns}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise PlanError(f"run columns must be vectors of one length, got shapes {shapes}")
        if len(self) and self.count.min() < 1:
            raise PlanError(f"a run moves {int(self.count.min())} tokens, must be at least 1")

    @property
    def columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, f.name) for f in fields(type(self)))

    def __len__(self) -> int:
        return len(self.count)

    @property
    def num_tokens(self) -> int:
        """Tokens written, each target replica counted."""
        return int(self.count.sum())

    def take(self, index: Ints | npt.NDArray[np.bool_]) -> "TransferRuns":
        """The runs that a mask or index array selects."""
        return TransferRuns.of_fresh(*(column[index] for column in self.columns))

    @classmethod
    def none(cls) -> "TransferRuns":
        return cls.of_fresh(*(np.empty(0, np.int64) for _ in fields(cls)))

    @classmethod
    def of_fresh(cls, *columns: Ints) -> "TransferRuns":
        """Of arrays that nobody else holds: they become read-only in place of being copied."""
        for column in columns:
            column.setflags(write=False)
        return cls(*columns)


def _heads(heads: tuple[SupportsIndex, SupportsIndex]) -> Heads:
    start, stop = heads
    return integer(start, "a head"), integer(stop, "a head")


@frozen(eq=False)
class PlanPart:
    """How the heads ``[start, stop)`` of components that share a group and holders on either side
    get from source ranks to target ranks. `copies` is the second stage: runs from a target rank
    that has received them to another one on its host, through the same block table."""

    src_group: str
    dst_group: str
    components: tuple[str, ...] = field(converter=names)
    start: int = field(converter=integer)
    stop: int = field(converter=integer)
    runs: TransferRuns
    heads: Heads = field(default=(0, 1), converter=_heads)
    copies: TransferRuns = field(factory=TransferRuns.none)


def _parts(parts: Iterable[PlanPart]) -> tuple[PlanPart, ...]:
    return tuple_of(PlanPart, parts)


@frozen(eq=False)
class Plan:
    """Moves `tokens` = ``(start, stop)`` from `src` to `dst`; by default those of the first part.
    Components in `absent` are deliberately not moved."""

    src: KVLayout
    dst: KVLayout
    parts: tuple[PlanPart, ...] = field(converter=_parts)
    absent: tuple[str, ...] = field(default=(), converter=names)
    tokens: tuple[int, int] = field(converter=token_range)

    @tokens.default
    def _of_first_part(self) -> tuple[int, int]:
        return (self.parts[0].start, self.parts[0].stop) if self.parts else (0, 0)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything the plan says: equal plans, equal digests, on any machine."""
        absent = tuple(sorted(self.absent))
        specs = dict.fromkeys((self.src.spec, self.dst.spec))  # one, if they are equal
        sides = [
            (side.placement, side.groups, side.head_ranks, side.stages, side.hosts)
            for side in (self.src, self.dst)
        ]
        said = (*sides, tuple(map(_spec, specs)), self.tokens, absent, self.parts)
        h = hashlib.sha256()
        _tell(h.update, said)
        return h.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The (source rank, target rank) pairs that move anything, sorted."""
        return _pairs(part.runs for part in self.parts)

    @property
    def local_links(self) -> tuple[tuple[int, int], ...]:
        """The (target rank, target rank) pairs of the second stage, sorted."""
        return _pairs(part.copies for part in self.parts)

    @property
    def link_nbytes(self) -> int:
        """Bytes that leave the source's ranks."""
        return sum(part.runs.num_tokens * self.row_nbytes(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes written on all targets."""
        copied = sum(part.copies.num_tokens * self.row_nbytes(part) for part in self.parts)
        return self.link_nbytes + copied

    def row_nbytes(self, part: PlanPart) -> int:
        """Bytes of one token in the heads and components of a part."""
        return sum(self.dst.spec[c].record.row_nbytes(part.heads) for c in part.components)

    @property
    def num_runs(self) -> int:
        return sum(len(part.runs) + len(part.copies) for part in self.parts)


def _pairs(columns: Iterable[TransferRuns]) -> tuple[tuple[int, int], ...]:
    pairs: set[tuple[int, int]] = set()
    for runs in columns:
        both = np.stack([runs.src_rank, runs.dst_rank], axis=1)
        pairs.update((int(s), int(d)) for s, d in np.unique(both, axis=0))
    return tuple(sorted(pairs))


def _spec(spec: KVCacheSpec) -> tuple[object, ...]:
    """A spec in few words: its records once, and which one each component has."""
    records = {record: i for i, record in enumerate({c.record: None for c in spec.components})}
    components = [(c.kind, c.layer_id, c.part, records[c.record]) for c in spec.components]
    return tuple(records), tuple(components), spec.content


def _tell(say: Callable[[bytes | memoryview], None], value: object) -> None:
    """Says a value in a form in which different values differ: kind, length, then content."""
    match value:
        case str():
            text = value.encode("utf-8", "surrogatepass")
            say(b"s%d:%b" % (len(text), text))
        case int():
            say(b"i%d;" % value)
        case tuple():
            say(b"t%d:" % len(value))
            for member in value:
                _tell(say, member)
        case np.ndarray():
            say(b"a%d:" % len(value))
            say(np.ascontiguousarray(value, dtype="<i8").data)
        case _:
            kind = type(value)
            members = [getattr(value, f.name) for f in fields(kind)] if has(kind) else [str(value)]
            say(b"v")
            _tell(say, (kind.__name__, *members))

"""Plans: which token goes from which rank and local index to which, as arithmetic runs.

A plan is a value. It knows no block ids and no addresses: those bind last, so one plan serves
every request of the same range between two peers. Runs live on the token axis and are shared by
all components of a part; bytes appear only when the plan is lowered.
"""

import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt
from attrs import field, fields, frozen

from kvflow.errors import PlanError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.sharding import Ints, as_ints


def _column(values: object) -> Ints:
    return as_ints(values)  # type: ignore[arg-type]


@frozen(eq=False)
class TransferRuns:
    """Run i moves `count[i]` tokens: token ``token + k*token_stride`` lies at local index
    ``src_local + k*src_stride`` of `src_rank` and goes to ``dst_local + k*dst_stride`` of
    `dst_rank`. Neither side of a run leaves its page. int64 columns of equal length."""

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
        return TransferRuns(*(column[index] for column in self.columns))


@frozen(eq=False)
class PlanPart:
    """The runs of the components that one source group and one target group share."""

    src_group: str
    dst_group: str
    components: tuple[str, ...]
    start: int
    stop: int
    runs: TransferRuns


@frozen(eq=False)
class Plan:
    """Moves tokens from `src` to `dst`. Components in `absent` are deliberately not moved."""

    src: KVLayout
    dst: KVLayout
    parts: tuple[PlanPart, ...]
    absent: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything the plan says: equal plans, equal digests, on any machine."""
        h = hashlib.sha256()
        for text in (str(self.src), str(self.dst), *_spec_lines(self), *sorted(self.absent)):
            h.update(text.encode() + b"\0")
        for part in self.parts:
            head = (part.src_group, part.dst_group, *part.components, part.start, part.stop)
            h.update(repr(head).encode() + b"\0")
            for column in part.runs.columns:
                h.update(np.ascontiguousarray(column, dtype="<i8").tobytes() + b"\0")
        return h.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The (source rank, target rank) pairs that move anything, sorted."""
        pairs: set[tuple[int, int]] = set()
        for part in self.parts:
            both = np.stack([part.runs.src_rank, part.runs.dst_rank], axis=1)
            pairs.update((int(s), int(d)) for s, d in np.unique(both, axis=0))
        return tuple(sorted(pairs))

    @property
    def nbytes(self) -> int:
        """Bytes written on all targets."""
        return sum(
            part.runs.num_tokens * sum(self.dst.spec[c].record.nbytes for c in part.components)
            for part in self.parts
        )

    @property
    def num_runs(self) -> int:
        return sum(len(part.runs) for part in self.parts)


def _spec_lines(plan: Plan) -> list[str]:
    lines = []
    for spec in (plan.src.spec, plan.dst.spec):
        lines += [f"{c.name} {c.part} {c.record}" for c in spec.components]
        lines += [f"{key}={value}" for key, value in spec.content]
    return lines

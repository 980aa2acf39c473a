"""Text of shardings, placements and pagings."""

import re
from collections.abc import Iterable, Iterator, Sequence

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.mesh import Axis, Mesh, Placement, check_num_ranks
from kvflow.layouts.paging import Dense, Paged, Paging, Pool
from kvflow.layouts.sharding import ANY_STOP, Replicated, RoundRobin, Sharding
from kvflow.layouts.text.scan import TextError, Word

PLACEMENTS = (
    "a placement: dcp8(i=1), pcp4*dcp2@pcp(i=16), replicated(4), "
    "round_robin(N,i=I), balanced(N,A:B), contiguous(N,A:B)"
)
PAGINGS = "a paging: paged(B), pool(B) or dense(N)"

_PAGINGS = {"paged": Paged, "pool": Pool, "dense": Dense}
_AXIS = re.compile(r"([a-z_]+)([0-9]+)(?:@([a-z_]+(?:\+[a-z_]+)*))?")


def read_paging(word: Word) -> Paging:
    """`paged(B)`, `pool(B)` or `dense(N)`."""
    call = word.call()
    if call is None or call[0] not in _PAGINGS:
        word.fail(PAGINGS)
    name, arguments = call
    if len(arguments) != 1:
        word.fail(f"one number in {name}(...)")
    (tokens,) = arguments
    paging: Paging = _PAGINGS[name](tokens.number("tokens of a page", 1))
    return paging


def format_paging(paging: Paging) -> str:
    """Raises `LayoutError` for a paging of a type that the language does not know."""
    if type(paging) not in _PAGINGS.values():
        raise LayoutError(f"{paging!r} has no text form")
    return str(paging)


# --- placements -----------------------------------------------------------------------------------


def read_placement(word: Word, on: Word | None = None) -> Placement:
    """A placement; `on` is the word behind `on`, if any: the ranks of every shard."""
    call = word.call()
    try:
        if call is not None and call[0] in _SHARDINGS:
            placed = _SHARDINGS[call[0]](word, call[1])
        elif word.text == "replicated":
            placed = _replicated(word, [])
        else:
            placed = _read_mesh(word)
        return placed if on is None else Placement(placed.sharding, read_ranks(on))
    except TextError:
        raise
    except LayoutError as error:
        word.fail(f"a lawful placement, but {error}")


def read_ranks(word: Word) -> list[list[int]]:
    """Groups of ranks: `0,4|1-3` is ranks 0 and 4, then ranks 1, 2 and 3; `0|` ends with none."""
    groups = [group.split(",") if group.text else [] for group in word.split("|")]
    return [[r for part in group for r in _range(part)] for group in groups]


def _range(word: Word) -> range:
    ends = [end.number("a rank, or a range of them as A-B") for end in word.split("-")]
    if len(ends) > 2 or ends[-1] < ends[0]:
        word.fail("a range of ranks as A-B")
    check_num_ranks(ends[-1] - ends[0] + 1)
    return range(ends[0], ends[-1] + 1)


def format_ranks(groups: Iterable[Sequence[int]]) -> str:
    """The inverse of `read_ranks`; three or more neighbours are a range."""
    return "|".join(",".join(_ranges(group)) for group in groups)


def _ranges(ranks: Sequence[int]) -> Iterator[str]:
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        end = end if end - at > 1 else at
        yield str(ranks[at]) if end == at else f"{ranks[at]}-{ranks[end]}"
        at = end + 1


def _interval(word: Word, *, bounded: bool) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+):([0-9]*)", word.text)
    if match is None or (bounded and not match[2]):
        word.fail(f"positions as A:B{'' if bounded else ' or A:'}")
    first, stop = (
        word.sub(*match.span(i)).number("a position") if match[i] else ANY_STOP for i in (1, 2)
    )
    return first, stop


def _round_robin(word: Word, arguments: Sequence[Word]) -> Placement:
    if not 1 <= len(arguments) <= 2:
        word.fail("round_robin(N,i=I)")
    interleave = _read_interleave(arguments[1]) if arguments[1:] else 1
    return Placement.simple(RoundRobin(arguments[0].number("ranks", 1), interleave))


def _read_interleave(word: Word) -> int:
    if not word.text.startswith("i="):
        word.fail("i=I, the consecutive tokens that one rank stores")
    return word.sub(2).number("the interleave", 1)


def _replicated(word: Word, arguments: Sequence[Word]) -> Placement:
    rest, ranks = list(arguments), 1
    if rest and ":" not in rest[0].text:
        ranks = rest.pop(0).number("ranks", 1)
    if len(rest) > 1:
        word.fail("replicated(N), replicated(A:B) or replicated(N,A:B)")
    check_num_ranks(ranks)
    start, stop = _interval(*rest, bounded=False) if rest else (0, ANY_STOP)
    return Placement(Replicated(start, stop), (range(ranks),))


def _balanced(word: Word, arguments: Sequence[Word]) -> Placement:
    if len(arguments) < 2:
        word.fail("balanced(N,A:B) with ,ceil and ,rotate=R if wanted")
    num = arguments[0].number("ranks", 1)
    start, stop = _interval(arguments[1], bounded=True)
    form, rotate = "even", 0
    for a in arguments[2:]:
        if a.text in ("even", "ceil"):
            form = a.text
        elif re.fullmatch(r"rotate=-?[0-9]+", a.text):
            digits = a.sub(len("rotate=-" if "-" in a.text else "rotate="))
            rotate = digits.number("a rotation")
            rotate = -rotate if "-" in a.text else rotate
        else:
            a.fail("even, ceil or rotate=R")
    return Placement.simple(BalancedChunks(num, start, stop, form, rotate))  # type: ignore[arg-type]


def _contiguous(word: Word, arguments: Sequence[Word]) -> Placement:
    if len(arguments) != 2:
        word.fail("contiguous(N,A:B)")
    start, stop = _interval(arguments[1], bounded=True)
    return Placement.simple(Contiguous(arguments[0].number("ranks", 1), start, stop))


_SHARDINGS = {
    "round_robin": _round_robin,
    "replicated": _replicated,
    "balanced": _balanced,
    "contiguous": _contiguous,
}


def _read_mesh(word: Word) -> Placement:
    """Axes, slowest first. The one that `(i=I)` follows deals the tokens, else the one called
    dcp; several axes in brackets deal together; all others replicate."""
    axes: list[Axis] = []
    dealing: list[str] | None = None
    interleave = 1
    for factor in word.split("*"):
        inner, deal = factor, None
        if factor.text.endswith(")") and "(i=" in factor.text:
            at = factor.text.rindex("(i=")
            inner, deal = factor.sub(0, at), _read_interleave(factor.sub(at + 1, -1))
        grouped = inner.text.startswith("(") and inner.text.endswith(")")
        found = [_read_axis(a) for a in (inner.sub(1, -1).split("*") if grouped else [inner])]
        axes += found
        if deal is not None or grouped:
            if dealing is not None:
                factor.fail("one dealing axis, another one was named before")
            dealing, interleave = [a.name for a in found], deal or 1
    if dealing is None:
        dealing = [a.name for a in axes if a.name == "dcp"]
    mesh = Mesh(tuple(axes))
    ranks = mesh.ranks_by_shard(*dealing)
    sharding: Sharding = RoundRobin(len(ranks), interleave) if dealing else Replicated()
    return Placement(sharding, ranks)


def _read_axis(word: Word) -> Axis:
    match = _AXIS.fullmatch(word.text)
    if match is None:
        word.fail(PLACEMENTS)
    size = word.sub(*match.span(2)).number("ranks")
    return Axis(match[1], size, tuple(match[3].split("+")) if match[3] else ())


def format_placement(placement: Placement) -> str:
    """The shortest of the forms that say exactly this. Raises `LayoutError` for a sharding of a
    type that the language does not know."""
    sharding, sizes = placement.sharding, {len(ranks) for ranks in placement.ranks}
    if type(sharding) not in (RoundRobin, Replicated, BalancedChunks, Contiguous):
        raise LayoutError(f"{sharding!r} has no text form")
    for form in (form for size in sizes for form in _short_forms(sharding, size)):
        if read_placement(Word.alone(form)) == placement:
            return form
    (form,) = _short_forms(sharding, 1)
    return f"{form} on {format_ranks(placement.ranks)}"


def _short_forms(sharding: Sharding, size: int) -> list[str]:
    """Texts of placements of this sharding with `size` ranks a shard, numbered in some order."""
    if isinstance(sharding, RoundRobin):
        num, deal = sharding.num_shards, f"(i={sharding.interleave})"
        if size == 1:
            return [f"dcp{num}{deal}"]
        forms = [f"pcp{num * size}*dcp{num}@pcp{deal}"]
        for n in (n for n in range(2, size + 1) if size % n == 0):
            outer = f"pcp{size // n}*" if n < size else ""
            forms.append(f"{outer}dcp{num}{deal}*tp{n}")
        return forms
    if isinstance(sharding, Replicated):
        arguments = [str(size)] if size > 1 else []
        if sharding != Replicated():
            stop = "" if sharding.stop == ANY_STOP else sharding.stop
            arguments.append(f"{sharding.start}:{stop}")
        return [f"replicated({','.join(arguments)})" if arguments else "replicated"]
    return [str(sharding)]

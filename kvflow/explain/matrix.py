"""Which transfers kvflow carries out: found by running its planner, proof and an executor.

`KINDS` are the layouts of the field in a small model, each of them both a source and a target;
`HEAD_KINDS` are those of attention with heads. `REFUSED` pairs what the systems of today refuse (or
get wrong without a word) with transfers of that kind at the real model's size.
"""

from collections.abc import Callable, Iterable

from attrs import evolve, frozen

from kvflow.errors import KvflowError
from kvflow.explain.prices import synthetic_binding
from kvflow.layouts.layout import Binding
from kvflow.layouts.text import parse_layout
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

SMALL = 300
"""More than a round of 8 ranks by 32 tokens."""

Tokens = tuple[int, int]
Move = Callable[[Binding, Binding, Tokens], None]
"""Moves the tokens on fresh caches and compares every byte of both sides; raises for one wrong."""


@frozen
class Kind:
    """A layout of the matrix: what it is called, and its text without the model."""

    name: str
    text: str


KINDS = (
    Kind("one rank", "replicated paged(8)"),
    Kind("DCP, I = B", "dcp4(i=4) paged(4)"),
    Kind("DCP, I = 1", "dcp4(i=1) paged(4)"),
    Kind("DCP, I and B coprime", "dcp3(i=2) paged(5)"),
    Kind("PCP alone", "replicated(4) paged(4)"),
    Kind("PCP chunks", "balanced(3,0:27) paged(4)"),
    Kind("DCP folded over PCP", "pcp4*dcp2@pcp(i=1) paged(4)"),
    Kind("PCP x DCP x TP", "pcp2*dcp2(i=2)*tp2 paged(4)"),
    Kind("PCP and DCP deal together", "(pcp2*dcp2)(i=4) paged(4)"),
    Kind("1 < W < T", "tp4*dcp2@tp(i=4) paged(8)"),
    Kind("layers split", "replicated(2) paged(4) stages(all.0 on 0|all.1 on 1)"),
    Kind("HiSparse", "replicated latent:pool(8) indexer:paged(4)"),
    Kind("HiSparse, rows, W > 1", "dcp2(i=1) latent:pool(1) indexer:paged(8)"),
)
MODEL = "{latent.0-1:(latent:float8_e4m3fnx4)[row],"
MODEL += "indexer.0:(key:float8_e4m3fnx3,scale:float32x1)[planar]}"
"""Rows in two layers and planar pages in one: what a page of either kind can get wrong."""

TOKENS = (5, 27)
"""Behind a prefix that the target holds, with a partial page at either end."""

HEAD_KINDS = (
    Kind("T = 1, NHD", "replicated paged(4) [t h e]"),
    Kind("T = 1, HND", "replicated paged(8) [h t e]"),
    Kind("T = 2, NHD", "replicated(2) paged(4) heads(0|1) [t h e]"),
    Kind("T = 4, HND, DCP 2", "tp4*dcp2@tp(i=2) paged(4) heads(0,1|2,3) [h t e]"),
    Kind("T = 4 for 2 heads", "replicated(4) paged(4) heads(0|1|2|3) [t h e]"),
    Kind("T = 2, transposed", "replicated(2) paged(4) heads(0|1) [h e t]"),
    Kind("T = 2, VNNI tiles", "replicated(2) paged(8) heads(0|1) [h t e t4 e2]"),
)
HEAD_MODEL = "{{key.0-1:(key:bfloat16x4x2h)[{order}],value.0-1:(value:bfloat16x4x2h)[{order}]}}"


@frozen
class Refused:
    """One row of what today's systems refuse: its number in the list of facts, what they do, and
    transfers of that kind as (source, target)."""

    number: int
    what: str
    today: str
    pairs: tuple[tuple[str, str], ...]
    tokens: Tokens = (0, 2000)


_DECODE = "replicated paged(64)"
_HISPARSE = "replicated latent:pool(64) indexer:paged(64)"
REFUSED = (
    Refused(
        1,
        "interleave other than the page size on the sending side",
        "accepted, silently wrong",
        tuple((f"dcp8(i={i}) paged(64)", _DECODE) for i in (32, 8, 1)),
    ),
    Refused(
        2,
        "HiSparse with W > 1",
        "refused",
        (("dcp8(i=1) paged(64)", "dcp2(i=1) latent:pool(1) indexer:paged(64)"),),
    ),
    Refused(
        3,
        "senders with PCP alone, receivers sharded or not",
        "rank 0 alone serves; a sharded receiver is refused",
        (("replicated(8) paged(64)", _DECODE), ("replicated(8) paged(64)", "dcp4 paged(64)")),
    ),
    Refused(
        4,
        "PCP x DCP with T > 1",
        "refused",
        (
            ("pcp4*dcp4@pcp+tp(i=64)*tp2 paged(64)", _DECODE),
            ("pcp2*dcp4(i=1)*tp2 paged(64)", _DECODE),
        ),
    ),
    Refused(
        5,
        "PCP on the receiving side, and decode back to prefill",
        "refused",
        ((_DECODE, "pcp8*dcp8@pcp(i=1) paged(64)"), (_HISPARSE, "replicated(8) paged(64)")),
        (1500, 2000),
    ),
    Refused(
        6,
        "widths that do not divide each other, and 1 < W < T",
        "refused",
        (
            ("dcp8(i=64) paged(64)", "dcp6(i=64) paged(64)"),
            ("dcp4(i=1) paged(64)", "dcp3(i=1) paged(64)"),
            ("dcp8(i=1) paged(64)", "tp8*dcp4@tp(i=16) paged(64)"),
        ),
    ),
    Refused(
        7,
        "other page sizes with other groups, partial pages",
        "refused",
        (("dcp8(i=1) paged(16)", "replicated latent:pool(64) indexer:paged(32)"),),
        (777, 1999),
    ),
    Refused(
        8,
        "a HiSparse sender",
        "refused",
        ((_HISPARSE, _DECODE), (_HISPARSE, "dcp8(i=1) paged(16)")),
    ),
    Refused(
        10,
        "an offload tier without copies of replicas, in a layout of its own",
        "PCP replicas stored P times; the interleave is not in the key",
        (
            ("replicated(8) paged(64)", "replicated pool(256)"),
            ("dcp8(i=1) paged(64)", "replicated pool(256)"),
        ),
    ),
)


@frozen
class Outcome:
    """What came of one pair: how far it got, the runs and links of its plan, and the error."""

    planned: bool
    verified: bool
    moved: bool | None
    num_runs: int = 0
    num_links: int = 0
    error: str = ""

    @property
    def is_good(self) -> bool:
        return self.planned and self.verified and self.moved is not False


def run_pair(src: str, dst: str, tokens: Tokens, move: Move | None = None) -> Outcome:
    """Plans and verifies the transfer between two texts, and moves it if `move` is given."""
    planned = verified = False
    moved: bool | None = None
    try:
        layouts = [parse_layout(text) for text in (src, dst)]
        plan = plan_transfer(layouts[0], layouts[1], tokens)
        planned = True
        bindings = [synthetic_binding(layout, tokens[1]) for layout in layouts]
        verify_plan(plan, *bindings)
        verified = True
        if move is not None:
            moved = False
            move(bindings[0], bindings[1], tokens)
            moved = True
    except (KvflowError, AssertionError) as error:
        return Outcome(planned, verified, moved, error=f"{type(error).__name__}: {error}")
    return Outcome(planned, verified, moved, plan.num_runs, len(plan.links))


def run_matrix(kinds: Iterable[Kind], move: Move) -> dict[tuple[str, str], Outcome]:
    """Every kind to every kind, by their names."""
    texts = {kind.name: _text(kind) for kind in kinds}
    return {
        (a, b): run_pair(src, dst, TOKENS, move)
        for a, src in texts.items()
        for b, dst in texts.items()
    }


def _text(kind: Kind) -> str:
    placed, _, order = kind.text.partition(" [")
    return f"{placed} {HEAD_MODEL.format(order=order[:-1]) if order else MODEL}"


def run_refused(row: Refused, move: Move) -> tuple[Outcome, ...]:
    """The pairs of a row: planned and proven for GLM-5.3 in fp8; moved in the small model, with at
    most `SMALL` tokens."""
    outcomes = []
    start, stop = row.tokens
    few = (max(start - max(stop - SMALL, 0), 0), min(stop, SMALL))
    for src, dst in row.pairs:
        real = run_pair(f"{src} glm-5.3/fp8", f"{dst} glm-5.3/fp8", row.tokens)
        small = run_pair(f"{src} {MODEL}", f"{dst} {MODEL}", few, move)
        outcomes.append(evolve(real, moved=small.moved, error=real.error or small.error))
    return tuple(outcomes)

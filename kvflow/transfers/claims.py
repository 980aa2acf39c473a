"""What a plan claims, checked alike by who derives a plan and who verifies one: a range inside
both domains, every declared component moved or named absent, and bytes of one meaning."""

from collections.abc import Collection

from kvflow.errors import ContentMismatch, PlanError
from kvflow.layouts.layout import KVLayout

MAX_TOKENS = 1 << 26
"""The longest range of one plan: arithmetic on more runs than that would end in no memory."""


def check_tokens(src: KVLayout, dst: KVLayout, tokens: tuple[int, int]) -> None:
    """Raises `PlanError` unless ``[start, stop)`` lies in the domain of both sides, and is no
    longer than `MAX_TOKENS`."""
    start, stop = tokens
    for side, layout in (("source", src), ("target", dst)):
        domain = layout.placement.sharding
        if not domain.start <= start <= stop <= domain.stop:
            raise PlanError(
                f"tokens [{start}, {stop}) must be a range inside the {side}'s "
                f"[{domain.start}, {domain.stop})"
            )
    if stop - start > MAX_TOKENS:
        raise PlanError(
            f"tokens [{start}, {stop}) are {stop - start}, one plan moves at most {MAX_TOKENS}"
        )


def check_components(
    src: KVLayout, dst: KVLayout, moved: Collection[str], absent: Collection[str]
) -> None:
    """Raises `PlanError` unless what is moved is declared by both sides, what is absent by one,
    and nothing else is declared."""
    here, there = set(src.spec.names), set(dst.spec.names)
    if unknown := sorted(set(absent) - (here | there)):
        raise PlanError(f"absent names {unknown}, which neither side declares")
    if unknown := sorted(set(moved) - (here & there)):
        raise PlanError(f"components {unknown} are not declared by both sides")
    if both := sorted(set(moved) & set(absent)):
        raise PlanError(f"components {both} are to be moved and absent at once")
    if forgotten := sorted((here | there) - set(moved) - set(absent)):
        raise PlanError(
            f"components {forgotten} are neither moved nor named absent "
            f"(source declares {len(here)}, target {len(there)})"
        )


def check_content(src: KVLayout, dst: KVLayout, moved: Collection[str]) -> None:
    """Raises `ContentMismatch` unless the bytes of the moved components mean the same."""
    mine, theirs = dict(src.spec.content), dict(dst.spec.content)
    for key in sorted(mine | theirs):
        if mine.get(key) != theirs.get(key):
            raise ContentMismatch(
                f"content field {key!r}: source has {mine.get(key)!r}, target {theirs.get(key)!r}"
            )
    here, there = ({c.name: c for c in layout.spec.components} for layout in (src, dst))
    for name in sorted(moved):
        a, b = here[name], there[name]
        if (a.part, a.record.fields) != (b.part, b.record.fields):
            raise ContentMismatch(
                f"component {name}: source stores {a.part} {a.record}, target {b.part} {b.record}"
            )

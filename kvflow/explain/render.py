"""The text of a report."""

from collections.abc import Iterable, Sequence

from kvflow.explain.report import Report

MAX_LINKS = 16


def render(report: Report) -> str:
    """The report as lines for a person."""
    start, stop = report.tokens
    sections = [
        [
            f"from  {report.src}",
            f"to    {report.dst}",
            f"tokens [{start}, {stop}): {stop - start:,} tokens, {nbytes_text(report.nbytes)} "
            f"({report.nbytes:,} bytes), {report.num_runs:,} runs, plan {report.digest[:12]}",
        ],
        _links(report),
        _strategies(report),
        _run_lengths(report),
        _sources(report),
        _components(report),
        _naive(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def nbytes_text(nbytes: int) -> str:
    """Bytes in a unit that leaves one to three digits before the point."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds as s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _links(report: Report) -> list[str]:
    rows = [
        (
            f"{link.src_rank} -> {link.dst_rank}",
            f"{link.num_tokens:,}",
            nbytes_text(link.nbytes),
            f"{link.num_runs:,}",
            f"{link.pick} {seconds_text(link.seconds[link.pick])}",
        )
        for link in report.links[:MAX_LINKS]
    ]
    if left := len(report.links) - len(rows):
        rows.append((f"and {left:,} more", "", "", "", ""))
    return _table((f"links: {len(report.links)}", "tokens", "bytes", "runs", "best"), rows)


def _strategies(report: Report) -> list[str]:
    rows = [
        (
            f"{'*' if s.name == report.pick else ' '} {s.name}",
            f"{s.num_descriptors:,}",
            nbytes_text(s.staging_nbytes),
            seconds_text(s.seconds),
        )
        for s in report.strategies
    ]
    return _table(("strategy", "descriptors", "staging", "predicted"), rows)


def _run_lengths(report: Report) -> list[str]:
    rows = [
        (
            f"  {r.low}" if r.low == 1 else f"  {r.low:,} to {2 * r.low - 1:,}",
            f"{r.num_runs:,}",
            f"{r.num_tokens:,}",
        )
        for r in report.run_lengths
    ]
    return _table(("tokens of a run", "runs", "tokens"), rows) if rows else []


def _sources(report: Report) -> list[str]:
    read = [s.nbytes for s in report.sources]
    used, total = sum(n > 0 for n in read), sum(read)
    lines = [f"source ranks read: {used} of {len(read)}"]
    if total:
        lines[0] += f", the busiest gives {max(read) * used / total:.2f}x the mean of those"
    replicas = sorted({s.replicas for s in report.sources if len(s.replicas) > 1})
    for group in replicas:
        shares = {s.rank: s.num_tokens for s in report.sources if s.rank in group}
        said = ", ".join(f"rank {rank} {n:,}" for rank, n in shares.items())
        lines.append(f"  replicas of one shard: {said} tokens")
    if (copied := report.nbytes - report.link_nbytes) > 0:
        lines.append(
            f"over links {nbytes_text(report.link_nbytes)}, then copied on the targets' hosts "
            f"{nbytes_text(copied)}"
        )
    return lines


def _components(report: Report) -> list[str]:
    c = report.components
    lines = [f"components moved: {c.moved or 'none'} ({c.moved_nbytes:,} bytes a token)"]
    if c.absent:
        lines.append(f"components absent: {c.absent} ({c.absent_nbytes:,} bytes a token)")
    return lines


def _naive(report: Report) -> list[str]:
    rows = [
        (f"  {n.says}", f"{n.num_wrong:,}", f"{n.num_wrong / max(n.num_tokens, 1):.0%}")
        for n in report.naive
    ]
    return _table(("what a simpler formula would misplace", "tokens", "of all"), rows)

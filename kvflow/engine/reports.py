"""What a decode group tells the front: transfers as one, and its pools as gauges."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.engine.prefix.pool import SharedBlockPool


def joined_report(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of a transfer that several ranks did parts of: counts add up, the time is that of
    the slowest, and it is verified if every part was."""
    return _one(reports, ("nbytes", "num_descriptors", "num_links", "num_parts"), "seconds")


def summed_report(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all parts that came from one engine, one after the other: counts and times add
    up, links are those of the part that had the most."""
    return _one(parts, ("nbytes", "num_descriptors", "num_parts", "seconds"), "num_links")


def _one(reports: Sequence[Mapping[str, Any]], sums: Sequence[str], most: str) -> dict[str, Any]:
    whole = dict(reports[0])
    for key in sums:
        whole[key] = sum(report[key] for report in reports)
    whole[most] = max(report[most] for report in reports)
    whole["strategies"] = tuple(sorted({s for report in reports for s in report["strategies"]}))
    verdicts = [report["verified"] for report in reports]
    whole["verified"] = None if None in verdicts else all(verdicts)
    return whole


def pool_gauges(pools: Mapping[str, SharedBlockPool]) -> dict[str, float]:
    """Blocks by group and holding. Raises `KvflowError` if a pool has lost one."""
    gauges = {}
    for name, pool in pools.items():
        pool.audit()
        gauges[f"free_blocks.{name}"] = float(pool.num_free)
        gauges[f"cached_blocks.{name}"] = float(pool.count("cached"))
        gauges[f"used_blocks.{name}"] = float(pool.count("used"))
        gauges[f"pinned_blocks.{name}"] = float(pool.count("pinned"))
        gauges[f"quarantined_blocks.{name}"] = float(pool.count("quarantined"))
    return gauges


def by_rank(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of a group's ranks under one roof: those of one rank as they are, of several as
    ``rank1.name``."""
    if len(numbers) == 1:
        return dict(numbers[0])
    return {f"rank{i}.{k}": v for i, values in enumerate(numbers) for k, v in values.items()}

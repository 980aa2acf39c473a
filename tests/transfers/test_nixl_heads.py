"""Head-sharded caches and copies on a host over NIXL, in every strategy."""

import pytest
from attrs import evolve
from endpoint_worlds import mover, nixl_world, pusher, untouched
from planning import bound, tp

from kvflow.errors import TransferError
from kvflow.testing import check_law
from kvflow.transfers.cost import DIRECT, STRATEGIES
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

TOKENS = (3, 21)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_heads_are_dealt_anew(strategy) -> None:
    """Four ranks with two heads each to two with four."""
    src, dst = tp(8, 4), tp(8, 2)
    check_law(mover(nixl_world(), strategy=strategy), bound(src, 21), bound(dst, 21), TOKENS)


@pytest.mark.parametrize("strategy", DIRECT)
def test_heads_are_pushed(strategy) -> None:
    src, dst = tp(8, 2), tp(8, 4)
    check_law(pusher(nixl_world(), strategy=strategy), bound(src, 21), bound(dst, 21), TOKENS)


def test_neighbours_on_a_host_pull_from_each_other() -> None:
    """One head on four ranks of one host: it crosses the link once, then it is copied."""
    src, dst = tp(1, 1), evolve(tp(1, 4), hosts=((0, 1, 2, 3),))
    plan = plan_transfer(src, dst, TOKENS)
    assert plan.link_nbytes * 4 == plan.nbytes
    assert plan.local_links
    check_law(mover(nixl_world()), bound(src, 21), bound(dst, 21), TOKENS)


def test_a_neighbour_of_another_rank_is_refused() -> None:
    """Rank 2 stands where rank 0, which has received the tokens, should."""
    src, dst = tp(1, 1), evolve(tp(1, 4), hosts=((0, 1, 2, 3),))
    both = BoundPlan(plan_transfer(src, dst, TOKENS), bound(src, 21), bound(dst, 21))
    side, rank = next(iter(both.plan.local_links))
    other = next(r for r in range(4) if r not in (side, rank))
    make = nixl_world()
    ends = [make(RankCache.allocate(dst, r, both.dst.num_blocks, fill=0xA5)) for r in (other, rank)]
    try:
        peers = {side: ends[1].connect(ends[0].export())}
        with pytest.raises(TransferError, match=f"is named for rank {side}, it is {other}"):
            ends[1].pull(both, rank, peers, timeout=5, verify=True, stage="copies")
        assert untouched(ends[1].cache)
    finally:
        for end in ends:
            end.close()

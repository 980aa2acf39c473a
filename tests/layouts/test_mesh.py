"""Meshes: products and folds against counting by hand, and what a placement refuses."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.text import parse_layout


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_plain_axes_count_ranks_like_an_odometer(sizes: list[int], data: st.DataObject) -> None:
    axes = [Axis(f"a{i}", n) for i, n in enumerate(sizes)]
    mesh = Mesh(tuple(axes))
    digits = list(product(*(range(n) for n in sizes)))  # the last axis turns fastest
    assert mesh.num_ranks == len(digits)
    for i, axis in enumerate(axes):
        expected = [d[i] for d in digits]
        assert mesh.coordinate(axis.name, range(len(digits))).tolist() == expected
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, d in enumerate(digits):
        groups.setdefault(tuple(d[i] for i in chosen), []).append(rank)
    told = mesh.ranks_by_shard(*(axes[i].name for i in chosen))
    assert told == tuple(tuple(groups[key]) for key in sorted(groups))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_folded_axis_adds_no_ranks(pcp: int, tp: int, dp: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([w for w in range(1, pcp * tp + 1) if pcp * tp % w == 0]))
    axes = (Axis("dp", dp), Axis("pcp", pcp), Axis("tp", tp), Axis("dcp", size, ("pcp", "tp")))
    mesh = Mesh(axes)
    assert mesh.num_ranks == dp * pcp * tp
    groups: list[list[int]] = [[] for _ in range(size)]
    for rank in range(mesh.num_ranks):
        groups[rank % (pcp * tp) % size].append(rank)
    assert mesh.ranks_by_shard("dcp") == tuple(map(tuple, groups))
    replicas = dp * pcp * tp // size
    assert {len(g) for g in mesh.ranks_by_shard("dcp")} == {replicas}


def test_folding_over_an_axis_that_is_not_the_fastest() -> None:
    mesh = Mesh((Axis("pcp", 4), Axis("tp", 2), Axis("dcp", 2, ("pcp",))))
    assert mesh.coordinate("dcp", range(8)).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.ranks_by_shard("dcp") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_pcp_4_and_dcp_4_folded_are_4_ranks() -> None:
    mesh = Mesh((Axis("pcp", 4), Axis("dcp", 4, over=("pcp",))))
    assert mesh.num_ranks == 4
    assert mesh.place(RoundRobin(4), "dcp").ranks == ((0,), (1,), (2,), (3,))
    assert str(mesh) == "pcp=4 dcp=4@pcp"
    assert str(Axis("d", 2, ("a", "b"))) == "d=2@a*b"


def test_fault_a06_pcp_without_dcp_is_one_shard_with_four_replicas() -> None:
    mesh = Mesh((Axis("pcp", 4), Axis("dcp", 1, over=("pcp",))))
    placement = mesh.place(Replicated(), "dcp")
    assert placement.sharding.num_shards == 1
    assert placement.ranks == ((0, 1, 2, 3),)


def test_fault_a08_stride_is_the_product_of_both_axes() -> None:
    mesh = Mesh((Axis("pcp", 2), Axis("dcp", 2)))
    placement = mesh.place(RoundRobin(4, interleave=4), "pcp", "dcp")
    assert placement.ranks == ((0,), (1,), (2,), (3,))
    owners = [placement.ranks[s][0] for s in placement.sharding.owner(range(0, 32, 4))]
    assert owners == [0, 1, 2, 3, 0, 1, 2, 3]
    runs = placement.sharding.runs(0, 32)
    sets = [
        {
            int(t) + k
            for s, t, n in zip(runs.shard, runs.token, runs.count, strict=True)
            if s == rank
            for k in range(n)
        }
        for rank in range(4)
    ]
    assert sorted(t for s in sets for t in s) == list(range(32))


def test_a_mesh_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(LayoutError, match=r"axes named twice in \['a', 'a'\]"):
        Mesh((Axis("a", 2), Axis("a", 2)))
    with pytest.raises(LayoutError, match="size 3 must divide the 4 ranks"):
        Mesh((Axis("pcp", 4), Axis("dcp", 3, ("pcp",))))
    with pytest.raises(LayoutError, match=r"c=2@b folds over b, which is folded itself"):
        Mesh((Axis("a", 4), Axis("b", 2, ("a",)), Axis("c", 2, ("b",))))
    with pytest.raises(LayoutError, match=r"no axis .x. in \[.a., .b.\]"):
        Mesh((Axis("a", 2), Axis("b", 2, ("x",))))
    with pytest.raises(LayoutError, match=r"Axis\.size = 0, must be at least 1"):
        Axis("a", 0)
    with pytest.raises(LayoutError, match="rank 4 is not one of the 4 of a=4"):
        Mesh((Axis("a", 4),)).coordinate("a", [0, 4])
    with pytest.raises(LayoutError, match="is not one of the 4"):
        Mesh((Axis("a", 4),)).coordinate("a", -1)


def test_placement_says_which_shard_a_rank_holds() -> None:
    placement = Placement(RoundRobin(2), ((3, 1), (0, 2)))
    assert [placement.shard_of(r) for r in range(4)] == [1, 0, 1, 0]
    assert placement.all_ranks == (0, 1, 2, 3)
    assert str(placement) == "round_robin(2,i=1) on 3,1|0,2"
    assert str(Placement.simple(RoundRobin(2))) == "round_robin(2,i=1)"
    with pytest.raises(LayoutError, match=r"rank 7 holds nothing, the ranks are \(0, 1, 2, 3\)"):
        placement.shard_of(7)


@pytest.mark.parametrize(
    ("ranks", "rule"),
    [
        (((0,),), "has 2 shards, ranks are given for 1"),
        (((0,), (0,)), "a rank holds one shard"),
        (((0, 1), ()), "every shard needs ranks"),
        (((0, 0), (1,)), "a rank holds one shard"),
    ],
)
def test_placement_refuses(ranks: tuple[tuple[int, ...], ...], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        Placement(RoundRobin(2), ranks)


@pytest.mark.parametrize(
    "ranks", [((5,), (-1,)), ((-1,), (5,)), ((0,), (2**62,)), ((2**62,), (0,))]
)
def test_every_rank_is_in_bounds(ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutError, match=f"at least 0 and below {2**62}, got"):
        Placement(RoundRobin(2), ranks)
    assert Placement(RoundRobin(2), ((2**62 - 1,), (0,))).shard_of(0) == 1


def test_more_ranks_than_any_system_has_are_refused_before_they_are_listed() -> None:
    for make in (
        lambda: Mesh((Axis("pcp", 2**40),)),
        lambda: Placement.simple(RoundRobin(2**40)),
        lambda: parse_layout("replicated(99999999999) paged(64)"),
        lambda: parse_layout("dcp99999999999 paged(64)"),
        lambda: parse_layout("dcp1 on 0-99999999999 paged(64)"),
    ):
        with pytest.raises(LayoutError, match=r"\d+ ranks, at most 65536"):
            make()
    assert Mesh((Axis("pcp", 65536),)).num_ranks == 65536
    with pytest.raises(LayoutError, match="65537 ranks, at most 65536"):
        Mesh((Axis("pcp", 65537),))

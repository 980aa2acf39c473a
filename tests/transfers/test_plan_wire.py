"""Plans on the wire: small, deterministic, derived anew, and refused when anything was changed."""

import json

import pytest
from attrs import evolve
from hypothesis import given, settings
from planning import SPEC, dcp, layout, whole, with_runs

from kvflow.errors import KvflowError, LayoutError, PlanError
from kvflow.layouts import GLM_5_3, KVCacheSpec, KVLayout, Paged, Placement, RoundRobin
from kvflow.layouts.sharding import Replicated
from kvflow.testing import Case, cases
from kvflow.transfers.joint import Holding, JointPlan, plan_joint
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.wire import (
    VERSION,
    joint_from_wire,
    joint_to_wire,
    plan_from_wire,
    plan_to_wire,
)

PLAN = plan_transfer(dcp(3), whole(8), (2, 23))


def changed(plan: Plan = PLAN, **fields: object) -> bytes:
    return json.dumps(json.loads(plan_to_wire(plan)) | fields).encode()


@settings(max_examples=40)
@given(case=cases(max_tokens=30))
def test_a_plan_arrives_as_it_left(case: Case) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    message = plan_to_wire(plan)
    arrived = plan_from_wire(message)
    assert arrived == plan
    assert (arrived.src, arrived.dst, arrived.tokens) == (plan.src, plan.dst, plan.tokens)
    assert plan_to_wire(arrived) == message


def test_the_message_has_version_1() -> None:
    assert json.loads(plan_to_wire(PLAN))["version"] == VERSION == 1


def test_what_is_absent_arrives() -> None:
    plan = plan_transfer(dcp(3), whole(), (0, 7), absent=["latent.2", "indexer.2"])
    arrived = plan_from_wire(plan_to_wire(plan))
    assert arrived == plan
    assert arrived.absent == ("indexer.2", "latent.2")


@pytest.mark.parametrize("num_tokens", [1, 1024, 1 << 20])
def test_fault_k09_a_message_stays_small_however_long_the_request(num_tokens: int) -> None:
    spec = KVCacheSpec.from_config(GLM_5_3)
    planar = KVLayout.uniform(spec, Placement.simple(RoundRobin(8)), Paged(64))
    same = KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(64))
    rows_spec = KVCacheSpec.from_config(GLM_5_3, index_arrangement="row")
    rows = KVLayout.uniform(rows_spec, Placement.simple(Replicated()), Paged(16))
    sizes = [len(plan_to_wire(plan_transfer(planar, d, (0, num_tokens)))) for d in (same, rows)]
    assert max(sizes) < 10_000, sizes
    if num_tokens == 1 << 20:
        plan = plan_transfer(planar, rows, (0, num_tokens))
        assert plan.num_runs > 100_000
        assert plan_from_wire(plan_to_wire(plan)) == plan


def test_a_plan_that_was_not_derived_does_not_arrive() -> None:
    runs = PLAN.parts[0].runs
    moved = evolve(runs, src_local=runs.src_local + 1)
    other = with_runs(PLAN, moved)
    with pytest.raises(PlanError) as refused:
        plan_from_wire(plan_to_wire(other))
    assert other.digest in str(refused.value)
    assert PLAN.digest in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 2}, f"version 2, this side reads {VERSION}"),
        ({"version": True}, "version True"),
        ({"version": None}, "version None"),
        ({"digest": "0" * 64}, "0" * 64),
        ({"digest": None}, "digest is None, must be a str"),
        ({"tokens": [2, 24]}, PLAN.digest),
        ({"tokens": [2]}, r"\[2\], must be"),
        ({"tokens": [2, 2.5]}, "2.5"),
        ({"tokens": [-1, 4]}, "range inside"),
        ({"tokens": [0, 2**60]}, "one plan moves at most"),
        ({"tokens": "22"}, "must be"),
        ({"absent": ["latent.0"]}, PLAN.digest),
        ({"absent": ["latent.9"]}, "latent.9"),
        ({"absent": "latent.0"}, "must be a list"),
        ({"absent": [1]}, "list of component names"),
        ({"src": []}, "must be a dict"),
        ({"dst": {"form": 0}}, "form 0"),
        ({"dst": {}}, PLAN.digest),
        ({"runs": []}, "runs"),
    ],
)
def test_a_changed_message_is_refused(fields, says: str) -> None:
    with pytest.raises(KvflowError, match=says):
        plan_from_wire(changed(**fields))


def test_a_changed_layout_is_seen_by_the_digest() -> None:
    said = json.loads(plan_to_wire(PLAN))
    said["src"]["ranks"] = said["src"]["ranks"][::-1]
    with pytest.raises(PlanError, match=PLAN.digest):
        plan_from_wire(json.dumps(said).encode())


@pytest.mark.parametrize(
    "message", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, "{}", None, 3]
)
def test_what_is_no_message_is_refused(message) -> None:
    with pytest.raises(PlanError):
        plan_from_wire(message)


def test_a_missing_field_and_one_said_twice_are_refused() -> None:
    said = json.loads(plan_to_wire(PLAN))
    del said["digest"]
    with pytest.raises(PlanError, match="has the fields"):
        plan_from_wire(json.dumps(said).encode())
    twice = plan_to_wire(PLAN).replace(b'"version":1', b'"version":1,"version":1')
    with pytest.raises(PlanError, match=r"^fields said twice: \['version'\]"):
        plan_from_wire(twice)


@pytest.mark.parametrize(
    "components",
    [None, [], {"forms": []}, {"forms": [], "rows": [[0, 1]]}, {"forms": [1], "rows": [[0, 1]]}],
)
def test_malformed_components_are_refused(components) -> None:
    said = json.loads(plan_to_wire(PLAN))
    said["src"]["components"] = components
    with pytest.raises(PlanError, match="malformed components"):
        plan_from_wire(json.dumps(said).encode())


def test_a_field_that_nothing_reads_is_refused() -> None:
    said = json.loads(plan_to_wire(PLAN))
    said["src"]["groups"][0]["alignment"] = 128
    message = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(PlanError, match=r"alignment.* at byte"):
        plan_from_wire(message)
    mine = plan_to_wire(PLAN)
    with pytest.raises(PlanError) as refused:
        plan_from_wire(mine + b" ")
    assert str(refused.value) == (
        f"plan message says {mine[-20:] + b' '!r} at byte {len(mine)}, "
        f"this side would say {mine[-20:]!r}"
    )
    with pytest.raises(PlanError) as refused:
        plan_from_wire(b" " + mine)
    assert str(refused.value) == (
        f"plan message says {b' ' + mine[:19]!r} at byte 0, this side would say {mine[:20]!r}"
    )


def test_an_unlawful_layout_is_refused_by_its_own_constructor() -> None:
    said = json.loads(plan_to_wire(PLAN))
    said["src"]["ranks"] = [[0], [0], [1]]
    with pytest.raises(LayoutError, match="ranks of its own"):
        plan_from_wire(json.dumps(said).encode())


def test_layouts_of_one_spec_say_it_once() -> None:
    apart = layout(RoundRobin(3), spec=evolve(SPEC, content=()))
    other = layout(Replicated(), spec=evolve(SPEC, content=()))
    same, lone = plan_transfer(apart, other, (0, 3)), plan_to_wire(PLAN)
    assert "components" not in json.loads(plan_to_wire(same))["dst"]
    assert "components" in json.loads(lone)["src"]


# --- joint plans


def joint(**changes) -> JointPlan:
    sources = [Holding(whole(1), (0, 9)), Holding(dcp(3), (0, 23))]
    return evolve(plan_joint(sources, whole(8), (2, 23), held={"latent.1": 5}), **changes)


def test_a_joint_plan_arrives_as_it_left() -> None:
    message = joint_to_wire(joint())
    arrived = joint_from_wire(message, whole(8))
    assert arrived == joint()
    assert joint_to_wire(arrived) == message
    some = plan_joint([Holding(dcp(3), (0, 7))], whole(8), (0, 7), absent=["latent.2"])
    assert joint_from_wire(joint_to_wire(some), whole(8)) == some
    nothing = plan_joint([], whole(8), (4, 4))
    assert joint_from_wire(joint_to_wire(nothing), whole(8)) == nothing


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"digest": "0" * 64}, "0" * 64),
        ({"legs": [3]}, "malformed legs"),
        ({"num_sources": 3}, r"at byte|digest"),
        ({"num_sources": 1}, "there are 1 sources"),
        ({"legs": [[0, {}]]}, "^plan has wire version None"),
        ({"legs": []}, "are not moved"),
        ({"claims": [[0, 3]]}, "malformed legs or claims"),
        ({"claims": [[2, 23, [None]]]}, "a claim is of component None, must be a name"),
        ({"claims": [[2, 23, list(SPEC.names)]]}, r"latent\.1: tokens \[2, 5\) are not moved"),
        ({"claims": []}, "must be declared by the target and either claimed or absent"),
        ({"absent": ["latent.0"]}, "must be declared"),
        ({"tokens": [2, 23]}, "has the fields"),
    ],
)
def test_a_changed_joint_message_is_refused(fields, says: str) -> None:
    message = json.dumps(json.loads(joint_to_wire(joint())) | fields).encode()
    with pytest.raises(KvflowError, match=says):
        joint_from_wire(message, whole(8))


def test_a_joint_plan_to_another_target_is_refused() -> None:
    with pytest.raises(PlanError, match="to another target"):
        joint_from_wire(joint_to_wire(joint()), whole(4))

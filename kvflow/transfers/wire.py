"""Plans on the wire: what a plan was derived from travels, never its runs.

The receiver derives the plan again and compares digests, so a message cannot make it move anything
that its own planner would not. A message is as small for a million tokens as for one.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvflow.errors import KvflowError, PlanError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.wire import layout_from_wire, layout_to_wire
from kvflow.transfers.joint import Claim, JointPlan, Leg, verify_joint
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

VERSION = 1
"""Version of the message; another one is refused."""

_PLAN = {"version": int, "src": dict, "dst": dict, "tokens": list, "absent": list, "digest": str}
_JOINT = {
    "version": int, "num_sources": int, "legs": list, "claims": list, "absent": list, "digest": str,
}  # fmt: skip
"""The fields of the two messages."""


def plan_to_wire(plan: Plan) -> bytes:
    """JSON (UTF-8) of both layouts, the tokens, what is deliberately not moved, and the digest.
    Equal plans give equal bytes on any machine. Only what `plan_transfer` derives arrives."""
    src, dst = (_packed(layout_to_wire(side)) for side in (plan.src, plan.dst))
    message = {
        "version": VERSION,
        "src": src,
        "dst": {key: value for key, value in dst.items() if value != src.get(key)},
        "tokens": list(plan.tokens),
        "absent": sorted(plan.absent),
        "digest": plan.digest,
    }
    return _bytes(message)


def plan_from_wire(message: bytes) -> Plan:
    """The plan, derived anew from what the message says it was derived from.

    Raises `PlanError` with both values for another version, for fields that are missing or
    unknown, and for a digest that the derived plan does not have; `LayoutError` for an unlawful
    layout, and whatever `plan_transfer` raises for layouts that allow no such plan.
    """
    said = _parsed(message, _PLAN)
    src = layout_from_wire(_unpacked(said["src"]))
    dst = layout_from_wire(_unpacked({**said["src"], **said["dst"]}))
    plan = plan_transfer(src, dst, said["tokens"], absent=said["absent"])
    _check_same(message, said["digest"], plan_to_wire(plan), plan.digest)
    return plan


def joint_to_wire(joint: JointPlan) -> bytes:
    """The messages of the legs, the claims as (range, components), what is absent, and the digest
    of the whole."""
    ranges: dict[tuple[int, int], list[str]] = {}
    for claim in joint.claims:
        ranges.setdefault((claim.start, claim.stop), []).append(claim.component)
    message = {
        "version": VERSION,
        "num_sources": joint.num_sources,
        "legs": [[leg.source, json.loads(plan_to_wire(leg.plan))] for leg in joint.legs],
        "claims": [[*tokens, names] for tokens, names in sorted(ranges.items())],
        "absent": sorted(joint.absent),
        "digest": joint.digest,
    }
    return _bytes(message)


def joint_from_wire(message: bytes, dst: KVLayout) -> JointPlan:
    """The joint plan to `dst`, each leg derived anew and the whole proven. Raises as
    `plan_from_wire` and `verify_joint` do."""
    said = _parsed(message, _JOINT)
    try:
        legs = [Leg(source, plan_from_wire(_bytes(plan))) for source, plan in said["legs"]]
        claims = [Claim(c, low, high) for low, high, names in said["claims"] for c in names]
    except (TypeError, ValueError) as error:
        if isinstance(error, KvflowError):
            raise
        raise PlanError(f"malformed legs or claims: {error}") from error
    joint = JointPlan(dst, said["num_sources"], legs, claims, said["absent"])
    verify_joint(joint)
    _check_same(message, said["digest"], joint_to_wire(joint), joint.digest)
    return joint


def _bytes(message: object) -> bytes:
    return json.dumps(message, sort_keys=True, separators=(",", ":")).encode()


def _check_same(message: bytes, digest: str, mine: bytes, own_digest: str) -> None:
    """What this side would have sent is what arrived: nothing in it is wrong or went unread."""
    if digest != own_digest:
        raise PlanError(
            f"the plan that arrived has digest {digest!r}, the one derived here from the same "
            f"layouts and tokens has {own_digest!r}"
        )
    if message != mine:
        pairs = enumerate(zip(message, mine, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(message), len(mine)))
        theirs, ours = (text[max(at - 20, 0) : at + 20] for text in (message, mine))
        raise PlanError(f"plan message says {theirs!r} at byte {at}, this side would say {ours!r}")


def _packed(layout: dict[str, Any]) -> dict[str, Any]:
    """Components as (which form, layer id): a model has many layers and few forms of them."""
    forms: list[dict[str, Any]] = []
    rows = []
    for component in layout["components"]:
        form = {key: value for key, value in component.items() if key != "layer_id"}
        if form not in forms:
            forms.append(form)
        rows.append([forms.index(form), component["layer_id"]])
    return layout | {"components": {"forms": forms, "rows": rows}}


def _unpacked(layout: dict[str, Any]) -> dict[str, Any]:
    try:
        packed = layout["components"]
        forms, rows = packed["forms"], packed["rows"]
        components = [forms[form] | {"layer_id": layer_id} for form, layer_id in rows]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PlanError(f"malformed components of a layout: {error!r}") from error
    return layout | {"components": components}


def _parsed(message: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(message, bytes | bytearray):
        raise PlanError(f"a plan message is bytes, got {type(message).__name__}")
    try:
        said = json.loads(message.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, KvflowError):
            raise
        raise PlanError(f"malformed plan message: {error}") from error
    if not isinstance(said, dict):
        raise PlanError(f"a plan message is an object, got {type(said).__name__}")
    if type(said.get("version")) is not int or said["version"] != VERSION:
        raise PlanError(f"plan has wire version {said.get('version')!r}, this side reads {VERSION}")
    if said.keys() != fields.keys():
        raise PlanError(f"a plan message has the fields {sorted(fields)}, got {sorted(said)}")
    for name, kind in fields.items():
        if type(said[name]) is not kind:
            raise PlanError(f"{name} is {said[name]!r}, must be a {kind.__name__}")
    if not all(isinstance(name, str) for name in said["absent"]):
        raise PlanError(f"absent is {said['absent']!r}, must be a list of component names")
    if len(said.get("tokens", "ab")) != 2:
        raise PlanError(f"tokens is {said['tokens']!r}, must be [start, stop]")
    return said


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no field is said twice."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise PlanError(f"fields said twice: {sorted({k for k in keys if keys.count(k) > 1})}")
    return dict(pairs)

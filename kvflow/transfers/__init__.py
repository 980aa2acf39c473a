"""Derive and move: plans between two layouts, their proof, and the executors that carry them out.

What is exported here is pure; executors (torch, NIXL, collectives) and operators are imported from
their modules.
"""

from kvflow.transfers.lower import BoundPlan, Descriptors, PageGeometry, SlotRuns, descriptors
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

__all__ = [
    "BoundPlan",
    "Descriptors",
    "PageGeometry",
    "Plan",
    "PlanPart",
    "SlotRuns",
    "TransferRuns",
    "descriptors",
    "plan_transfer",
    "verify_plan",
]

"""Reassemble: any layout to any other, by an executor or by endpoints that pull or push."""

from collections.abc import Mapping

from attrs import field, frozen

from kvflow.layouts.layout import KVLayout
from kvflow.transfers.executors.base import Endpoint, Executor, Pusher
from kvflow.transfers.executors.strided import move_link
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.protocol import Caches, Operator, check_bound, check_claims


@frozen(eq=False)
class Reassemble(Operator):
    """Any layout to any other, carried out by the executor it is given.

    Law: read(target, t) == read(source, t) on every replica of the target. Raises `PlanError`
    (`ContentMismatch`) at construction if the two sides do not hold the same content, or if a
    component they do not share is claimed."""

    source: KVLayout
    target: KVLayout
    via: Executor
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def __attrs_post_init__(self) -> None:
        check_claims(self)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        check_bound(self, bound)
        self.via.execute(bound, sources, targets)


@frozen(eq=False)
class ViaEndpoints:
    """Makes an executor of connected endpoints: each target rank pulls through its own.

    `endpoints` is by target rank, `peers` names the endpoint of every source rank; the memory of
    the source need not be reachable, so the source caches are not looked at. What ranks of one
    host copy from each other is copied at the end, between the target caches."""

    endpoints: Mapping[int, Endpoint]
    peers: Mapping[int, str]
    timeout: float
    verify: bool = False

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for rank in targets:
            self.endpoints[rank].pull(
                bound, rank, self.peers, timeout=self.timeout, verify=self.verify
            )
        copy_on_hosts(bound, targets)


@frozen(eq=False)
class ViaPush:
    """The other direction: each source rank pushes through its own endpoint.

    `endpoints` is by source rank, `peers` names the endpoint of every target rank. When it returns
    every byte that crosses a link is there; whoever runs the targets tells them so. What ranks of
    one host copy from each other is copied at the end, between the target caches."""

    endpoints: Mapping[int, Pusher]
    peers: Mapping[int, str]
    timeout: float
    verify: bool = False

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for rank in sources:
            self.endpoints[rank].push(
                bound, rank, self.peers, timeout=self.timeout, verify=self.verify
            )
        copy_on_hosts(bound, targets)


def copy_on_hosts(bound: BoundPlan, targets: Caches) -> None:
    """The second stage of a plan, once every link has ended: from target rank to target rank."""
    for dst_rank, target in targets.items():
        for part, rank, runs in bound.copies_to(dst_rank):
            move_link(runs, part.components, targets[rank].pages, target.pages)

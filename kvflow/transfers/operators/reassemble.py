"""Reassemble: any layout to any other, by an executor or by endpoints that pull or push."""

from collections.abc import Mapping

from attrs import field, frozen

from kvflow.layouts.layout import KVLayout
from kvflow.transfers.executors.base import Endpoint, Executor, Pusher
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
    the source need not be reachable, so the source caches are not looked at."""

    endpoints: Mapping[int, Endpoint]
    peers: Mapping[int, str]
    timeout: float
    verify: bool = False

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for rank in targets:
            self.endpoints[rank].pull(
                bound, rank, self.peers, timeout=self.timeout, verify=self.verify
            )


@frozen(eq=False)
class ViaPush:
    """The other direction: each source rank pushes through its own endpoint.

    `endpoints` is by source rank, `peers` names the endpoint of every target rank; the target
    caches are not looked at. When it returns every byte is there; whoever runs the targets tells
    them so."""

    endpoints: Mapping[int, Pusher]
    peers: Mapping[int, str]
    timeout: float
    verify: bool = False

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for rank in sources:
            self.endpoints[rank].push(
                bound, rank, self.peers, timeout=self.timeout, verify=self.verify
            )

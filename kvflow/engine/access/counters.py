"""What a rank counts of its collectives: bytes by kind, workspace bytes, and who waited when."""

from typing import Literal

from attrs import define, field, frozen

from kvflow.comm import JobTimes

Kind = Literal["new rows", "attention rows", "index keys", "positions", "queries", "partials"]
"""new rows: of this step, to everybody. attention rows, index keys: cached rows to the queries.
positions: which rows somebody wants. queries: of attention or of the indexer, to the rows.
partials: what comes back for them."""

Point = Literal["publish", "topk", "attend", "attended", "release"]


@frozen
class Fetched:
    """One fetch of cached rows: bytes that this rank received, its own share left out."""

    kind: Kind
    component: str
    part: int
    nbytes: int
    times: JobTimes


@frozen
class Moment:
    """When a rank reached a point of a layer, in seconds of the log's clock."""

    what: Point
    component: str
    at: float


@define(eq=False)
class StepLog:
    """The fetches of one step in the order of first use, and the moments of its layers."""

    fetches: list[Fetched] = field(factory=list)
    moments: list[Moment] = field(factory=list)


@define(eq=False)
class Counters:
    """Of one rank, over all steps. `received_nbytes` is by kind, what a rank sends itself left
    out; `workspace_peak_nbytes` is the most that rows of other ranks have taken at once, and
    `workspace_limit_nbytes` the largest bound that a step had for it; `num_collectives` is by kind
    too."""

    received_nbytes: dict[Kind, int] = field(factory=dict)
    num_collectives: dict[Kind, int] = field(factory=dict)
    workspace_nbytes: int = 0
    workspace_peak_nbytes: int = 0
    workspace_limit_nbytes: int = 0

    def received(self, kind: Kind, nbytes: int) -> None:
        self.received_nbytes[kind] = self.received_nbytes.get(kind, 0) + nbytes
        self.num_collectives[kind] = self.num_collectives.get(kind, 0) + 1

    def hold(self, nbytes: int) -> None:
        self.workspace_nbytes += nbytes
        self.workspace_peak_nbytes = max(self.workspace_peak_nbytes, self.workspace_nbytes)

    def free(self, nbytes: int) -> None:
        self.workspace_nbytes -= nbytes

    def bound(self, nbytes: int) -> None:
        self.workspace_limit_nbytes = max(self.workspace_limit_nbytes, nbytes)

    def gauges(self) -> dict[str, float]:
        """The most that workspaces have taken, and the most that they were allowed to."""
        return {
            "workspace_peak_nbytes": float(self.workspace_peak_nbytes),
            "workspace_limit_nbytes": float(self.workspace_limit_nbytes),
        }

    def totals(self) -> dict[str, float]:
        """Bytes received and collectives made, by kind: ``access_received_nbytes.index_keys``."""
        values = {f"access_received_nbytes.{_name(k)}": n for k, n in self.received_nbytes.items()}
        values |= {f"access_collectives.{_name(k)}": n for k, n in self.num_collectives.items()}
        return {name: float(n) for name, n in values.items()}


def _name(kind: Kind) -> str:
    return kind.replace(" ", "_")

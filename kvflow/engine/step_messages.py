"""What a front and its prefill ranks say about steps. See `kvflow.engine.messages`."""

from msgspec import Struct

from kvflow.engine.api import SamplingParams
from kvflow.engine.sampling import Sampled


class BlockCopy(Struct, frozen=True):
    """Rows that a request takes over from blocks of another table before it computes: by group,
    ranges of positions and the first entries of the table they lie in."""

    spans: dict[str, list[tuple[int, int]]]
    tables: dict[str, list[int]]


class UnitRows(Struct, frozen=True):
    """The positions [start, stop) of a request in units of the host tier: the first unit begins
    `skipped` positions before `start`. `labels` are what the units must be labelled with when they
    are read."""

    start: int
    stop: int
    units: list[int]
    labels: list[bytes] = []
    skipped: int = 0


class StepItem(Struct, frozen=True):
    """One request's share of a step: `tokens` at positions [start, start + len(tokens)).
    `next_token` is the prompt's token behind them, None if `sampling` decides it in this step.
    `tables` are the request's block tables by group. Before any rank computes come `copy`, then
    `load`; behind come `store`. Up to `num_drafts` drafts are tried behind the token that is
    sampled."""

    request_id: str
    start: int
    tokens: list[int]
    next_token: int | None
    tables: dict[str, list[int]]
    sampling: SamplingParams | None
    copy: BlockCopy | None = None
    load: UnitRows | None = None
    store: list[UnitRows] = []
    num_drafts: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class RunStep(Struct, frozen=True, tag=True):
    """To a prefill rank: join this step. Every rank of the group gets the same message."""

    step_id: int
    items: list[StepItem]


class StepDone(Struct, frozen=True, tag=True):
    """From a prefill rank: the tokens it sampled, by request, and the seconds it computed and the
    seconds it copied, loaded and stored rows. `refused` names requests whose loads did not hold
    what they should; they must be computed anew. `failed` says why requests have no token."""

    step_id: int
    rank: int
    sampled: dict[str, Sampled]
    seconds: float
    refused: list[str] = []
    move_seconds: float = 0.0
    failed: dict[str, str] = {}


class LayersDone(Struct, frozen=True, tag=True):
    """From a prefill rank: its part of the first `num_layers` layers of the step that runs is in
    its blocks."""

    step_id: int
    rank: int
    num_layers: int


class AttachTier(Struct, frozen=True, tag=True):
    """To a rank: map a host tier's memory, units of `unit_size` tokens."""

    name: str
    unit_size: int
    num_units: int

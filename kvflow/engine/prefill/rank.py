"""What a prefill rank does all its life: take messages, work, answer; and say why it cannot."""

import contextlib
import time
from collections.abc import Callable
from functools import partial

from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    AttachTier,
    Gauges,
    LayersDone,
    RankFailed,
    Ready,
    RunStep,
    Shutdown,
    StepDone,
)
from kvflow.engine.moves import Mover
from kvflow.engine.prefill.porter import Porter
from kvflow.engine.prefill.telling import TellingStep
from kvflow.engine.prefix.rows import RowCopier
from kvflow.engine.runner import StepRunner
from kvflow.engine.tiers.rows import UnitPort
from kvflow.errors import KvflowError
from kvflow.layouts.wire import layout_to_wire


def serve_prefill(
    runner: StepRunner, mover: Mover, mailbox: Mailbox, stream_layers: int = 0
) -> None:
    """A prefill rank: runs the steps it is given, and moves rows meanwhile, until `Shutdown`. Tells
    every `stream_layers` layers of a step what can be read (0: only when it ends)."""
    memory, num_blocks, endpoint = runner.memory, mover.num_blocks, mover.endpoint
    rows = RowCopier(memory.layout, memory.cache, num_blocks)
    layout, rank = layout_to_wire(memory.layout), runner.comm.rank
    port: UnitPort | None = None
    mailbox.send(Ready(layout, dict(num_blocks), endpoint.name, {rank: endpoint.export()}))
    with contextlib.closing(mover), Porter(rank, mover, mailbox) as porter:
        while True:
            match porter.receive():
                case Shutdown():
                    return
                case AttachTier() as tier:
                    port = UnitPort.attach(memory.layout, memory.cache, num_blocks, tier)
                case RunStep() as step:
                    if stream_layers:
                        tell = partial(_tell, porter, step.step_id, rank)
                        spec = memory.layout.spec
                        runner.watch = partial(
                            TellingStep, spec=spec, every=stream_layers, tell=tell
                        )
                    porter.send(_run_step(runner, rows, port, step))
                    porter.send(Gauges(dict(memory.gauges), dict(memory.totals)))
                case message:
                    raise KvflowError(
                        f"a prefill rank runs steps, it got a {type(message).__name__}"
                    )


def _tell(porter: Porter, step_id: int, rank: int, num_layers: int) -> None:
    porter.send(LayersDone(step_id, rank, num_layers))


def _run_step(
    runner: StepRunner, rows: RowCopier, port: UnitPort | None, step: RunStep
) -> StepDone:
    """Rows that the step takes over are there before it computes, and what it stores is written
    before it answers."""
    began = time.perf_counter()
    rows.copy(step.items)
    refused = port.load(step.items) if port is not None else []
    computing = time.perf_counter()
    tokens = runner.step(step.items)
    sampled = {name: run[0] for name, run in tokens.sampled.items()}
    computed = time.perf_counter()
    if port is not None:
        port.store(step.items)
    seconds = computed - computing
    moving = time.perf_counter() - began - seconds
    rank, failed = runner.comm.rank, tokens.failed
    return StepDone(step.step_id, rank, sampled, seconds, refused, moving, failed)


def guarded(mailbox: Mailbox, serve: Callable[[], None]) -> None:
    """Runs `serve`; tells the front before an error ends the rank."""
    try:
        serve()
    except Exception as error:
        mailbox.send(RankFailed(f"{type(error).__name__}: {error}"))
        raise

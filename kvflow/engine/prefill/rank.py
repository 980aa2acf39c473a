"""What a prefill rank does all its life: take messages, work, answer; and say why it cannot."""

import contextlib
import time
from collections.abc import Callable
from functools import partial

from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    AttachTier,
    Connect,
    Gauges,
    LayersDone,
    PullRows,
    PushRows,
    RankFailed,
    Ready,
    RowsPulled,
    RowsPushed,
    RunStep,
    Shutdown,
    StepDone,
)
from kvflow.engine.moves import Mover
from kvflow.engine.prefill.telling import TellingStep
from kvflow.engine.prefix.rows import RowCopier
from kvflow.engine.runner import StepRunner
from kvflow.engine.tiers.rows import UnitPort
from kvflow.errors import KvflowError
from kvflow.layouts.wire import layout_to_wire

_POLL_S = 0.001


def serve_prefill(
    runner: StepRunner, mover: Mover, mailbox: Mailbox, stream_layers: int = 0
) -> None:
    """A prefill rank: runs the steps it is given, and moves rows meanwhile, until `Shutdown`. Tells
    every `stream_layers` layers of a step what can be read (0: only when it ends)."""
    memory, num_blocks, endpoint = runner.memory, mover.num_blocks, mover.endpoint
    rows = RowCopier(memory.layout, memory.cache, num_blocks)
    layout = layout_to_wire(memory.layout)
    port: UnitPort | None = None
    exports = {runner.comm.rank: endpoint.export()}
    mailbox.send(Ready(layout, dict(num_blocks), endpoint.name, exports))
    with contextlib.closing(mover):
        while True:
            for message in mailbox.receive(_POLL_S if mover.busy else None):
                match message:
                    case Shutdown():
                        return
                    case Connect():
                        mover.connect(message)
                    case PullRows():
                        mover.begin(message)
                    case PushRows():
                        mover.begin_push(message)
                    case AttachTier():
                        port = UnitPort.attach(memory.layout, memory.cache, num_blocks, message)
                    case RunStep():
                        if stream_layers:
                            tell = partial(_tell, mailbox, message.step_id, runner.comm.rank)
                            spec = memory.layout.spec
                            runner.watch = partial(
                                TellingStep, spec=spec, every=stream_layers, tell=tell
                            )
                        mailbox.send(_run_step(runner, rows, port, message))
                        mailbox.send(Gauges(dict(memory.gauges), dict(memory.totals)))
                    case _:
                        raise KvflowError(
                            f"a prefill rank runs steps, it got a {type(message).__name__}"
                        )
            if endpoint.quiesced():  # else something of a failed pull may still arrive
                for name, report, error in mover.pulled():
                    mailbox.send(RowsPulled(name, runner.comm.rank, report, error))
                for name, report, error in mover.pushed():
                    mailbox.send(RowsPushed(name, runner.comm.rank, report, error))


def _tell(mailbox: Mailbox, step_id: int, rank: int, num_layers: int) -> None:
    mailbox.send(LayersDone(step_id, rank, num_layers))


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

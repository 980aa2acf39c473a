"""What a rank does all its life: take messages, work, answer; and say why if it cannot go on."""

import time
from collections.abc import Callable, Mapping

from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import Gauges, RankFailed, Ready, RunStep, Shutdown, StepDone
from kvflow.engine.prefix.rows import RowCopier
from kvflow.engine.runner import StepRunner
from kvflow.errors import KvflowError
from kvflow.layouts.wire import layout_to_wire
from kvflow.transfers.executors.base import Endpoint


def serve_prefill(
    runner: StepRunner, num_blocks: Mapping[str, int], endpoint: Endpoint, mailbox: Mailbox
) -> None:
    """A prefill rank: runs the steps it is given until `Shutdown`. Rows that a step takes over are
    there before it computes."""
    layout = layout_to_wire(runner.memory.layout)
    rows = RowCopier(runner.memory.layout, runner.memory.cache, num_blocks)
    mailbox.send(Ready(layout, dict(num_blocks), endpoint.name, endpoint.export()))
    while True:
        for message in mailbox.receive(None):
            if isinstance(message, Shutdown):
                return
            if not isinstance(message, RunStep):
                raise KvflowError(f"a prefill rank runs steps, it got a {type(message).__name__}")
            began = time.perf_counter()
            rows.copy(message.items)
            sampled = runner.run(message.items)
            seconds = time.perf_counter() - began
            mailbox.send(StepDone(message.step_id, runner.comm.rank, sampled, seconds))
            mailbox.send(Gauges({"workspace_nbytes": float(runner.memory.workspace_nbytes)}))


def guarded(mailbox: Mailbox, serve: Callable[[], None]) -> None:
    """Runs `serve`; tells the front before an error ends the rank."""
    try:
        serve()
    except Exception as error:
        mailbox.send(RankFailed(f"{type(error).__name__}: {error}"))
        raise

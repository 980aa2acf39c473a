"""The front's socket against real ranks' sockets: every answer arrives, strangers are refused."""

import asyncio
import threading

import pytest

from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.engine.messages import Gauges, RunStep, Shutdown
from kvflow.errors import KvflowError


def _answer(name, address):
    mailbox = ZmqMailbox(name, address)
    mailbox.send(Gauges({"step": -1.0}))
    while True:
        for message in mailbox.receive(None):
            if isinstance(message, Shutdown):
                mailbox.close()
                return
            mailbox.send(Gauges({"step": float(message.step_id)}))


def test_answers_that_cross_sends_arrive_and_strangers_are_refused(tmp_path):
    names = [f"rank-{r}" for r in range(4)]

    async def run():
        hub = ZmqHub(f"ipc://{tmp_path}/front")
        ranks = [threading.Thread(target=_answer, args=(n, hub.address)) for n in names]
        for rank in ranks:
            rank.start()
        for step in range(-1, 300):
            for name in names if step >= 0 else ():
                hub.send(name, RunStep(step, []))
            answers = [await asyncio.wait_for(hub.receive(), 20) for _ in names]
            assert sorted(answers, key=lambda a: a[0]) == [
                (name, Gauges({"step": float(step)})) for name in names
            ]
        with pytest.raises(KvflowError, match="rank 'nobody' cannot be reached"):
            hub.send("nobody", Shutdown())
        for name in names:
            hub.send(name, Shutdown())
        for rank in ranks:
            await asyncio.to_thread(rank.join)
        hub.close()

    asyncio.run(run())

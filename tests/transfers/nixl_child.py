"""A source process for tests: some ranks of `pair(...)` behind endpoints, told what to do."""

from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import forks
from attrs import frozen
from endpoint_worlds import nixl_world, pair, source_cache


def serve(pipe: Connection, pair_options: dict, endpoint_options: dict) -> None:
    """Sends one export a rank, then obeys: "close" ends it, "counters" answers with what the
    services counted."""
    bound = pair(**pair_options)
    ranks = bound.src.layout.placement.all_ranks
    make = nixl_world(**endpoint_options)
    endpoints = [make(source_cache(bound, rank)) for rank in ranks]
    pipe.send([endpoint.export() for endpoint in endpoints])
    while pipe.recv() != "close":
        pipe.send([(e.service.num_served, e._outbox.num_lent) for e in endpoints])
    for endpoint in endpoints:
        endpoint.close()
    pipe.send("closed")


@frozen(eq=False)
class Child:
    """A running source process."""

    process: BaseProcess
    pipe: Connection
    exports: list[bytes]

    @classmethod
    def start(cls, pair_options: dict, **endpoint_options) -> "Child":
        context = forks.context()
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, pair_options, endpoint_options))
        process.start()
        there.close()
        return cls(process, here, here.recv())

    def counters(self) -> list[tuple[int, int]]:
        self.pipe.send("counters")
        return self.pipe.recv()

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("close")
            assert self.pipe.recv() == "closed"
        self.process.join(20)
        assert not self.process.is_alive()
        self.process.close()
        self.pipe.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

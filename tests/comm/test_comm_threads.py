"""What only the in-process group promises: no hang, and schedules that differ are seen."""

import time

import pytest
import torch

from kvflow.comm import Comm, CommError, ThreadComm, ThreadGroup, run_ranks


def test_an_error_breaks_the_others_out_and_is_the_one_raised() -> None:
    def body(comm: Comm) -> None:
        comm.barrier()
        if comm.rank == 2:
            raise ValueError("boom")
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(ValueError, match="boom") as caught:
        run_ranks(4, body, timeout_s=30)
    assert time.monotonic() - start < 10
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


def test_a_rank_that_makes_fewer_calls() -> None:
    def body(comm: Comm) -> None:
        for _ in range(2 if comm.rank == 1 else 3):
            comm.barrier()

    with pytest.raises(CommError, match="rank 1 will not come: it has returned"):
        run_ranks(3, body, timeout_s=30)


def test_a_timeout_names_the_missing() -> None:
    group = ThreadGroup(2, timeout_s=0.05)
    with pytest.raises(CommError, match=r"ranks \[1\] did not come within 0.05 s"):
        ThreadComm(group, 0).barrier()
    with pytest.raises(CommError, match="rank 0 will not come"):
        group.meet(1, 1, ("barrier",), None)


@pytest.mark.parametrize("what", ["operation", "dtype", "row shape", "counts"])
def test_calls_that_differ_raise_on_every_rank(what: str) -> None:
    raised = []

    def body(comm: Comm) -> None:
        odd = comm.rank == 1
        dtype = torch.uint8 if odd and what == "dtype" else torch.float32
        rows = torch.zeros(1, 2 if odd and what == "row shape" else 3, dtype=dtype)
        counts = [1, 1, 2 if odd and what == "counts" else 1]
        try:
            if odd and what == "operation":
                comm.all_to_all(rows, [1, 0, 0])
            else:
                comm.all_gather(rows, counts)
        except CommError as error:
            raised.append(str(error))

    run_ranks(3, body)
    assert len(raised) == 3
    assert all("differs between ranks" in message for message in raised)


def test_trace_is_equal_on_all_ranks() -> None:
    def body(comm: Comm) -> None:
        comm.all_gather(torch.zeros(comm.rank, 4), [0, 1, 2])
        comm.all_to_all(torch.zeros(comm.rank, 4), [comm.rank, 0, 0])
        comm.barrier()

    traces = [[], [], []]
    run_ranks(3, body, traces=traces)
    assert traces[0] == [("all_gather", (3, 4)), ("all_to_all", (None, 4)), ("barrier", ())]
    assert traces[1] == traces[2] == traces[0]


def test_ranks_outside_the_group_are_refused() -> None:
    with pytest.raises(CommError, match=r"rank 2 of a group of 2, must be in \[0, 2\)"):
        ThreadComm(ThreadGroup(2), 2)


class Recording(ThreadGroup):
    """Keeps what was brought to its meetings."""

    def meet(self, number, rank, header, payload):  # type: ignore[no-untyped-def]
        brought.append(payload)
        return super().meet(number, rank, header, payload)


brought: list[object] = []


def test_what_others_read_does_not_alias_the_senders_rows() -> None:
    """A fast rank may reuse its buffer while a slow one still reads."""
    brought.clear()
    comm, rows = ThreadComm(Recording(1), 0), torch.zeros(2, 3)
    comm.all_gather(rows, [2])
    comm.all_to_all(rows, [2])
    rows.fill_(1)
    gathered, (exchanged,) = brought
    assert not gathered.any()
    assert not exchanged.any()

"""Byte strings over a `Comm`: one rank's to all, and everybody's to everybody. Collectives."""

import torch

from kvflow.comm.protocol import Comm


def all_gather_blobs(comm: Comm, blob: bytes) -> list[bytes]:
    """The byte strings of all ranks, in rank order; lengths are exchanged first."""
    length = torch.tensor([[len(blob)]], dtype=torch.int64)
    lengths = comm.all_gather(length, [1] * comm.size).flatten().tolist()
    rows = torch.frombuffer(bytearray(blob) or bytearray(1), dtype=torch.uint8)[: len(blob), None]
    whole = comm.all_gather(rows, lengths).flatten().numpy().tobytes()
    ends = [sum(lengths[: rank + 1]) for rank in range(comm.size)]
    return [whole[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def broadcast_blob(comm: Comm, blob: bytes | None) -> bytes:
    """Rank 0's byte string, on every rank; the others give None."""
    return all_gather_blobs(comm, blob or b"")[0]

"""Communication groups: one protocol, and its implementations for one rank, threads, processes."""

from kvflow.comm.dist import DistComm, connect_gloo, disconnect
from kvflow.comm.local import LocalComm
from kvflow.comm.protocol import Comm, CommError, PeerError
from kvflow.comm.threads import ThreadComm, ThreadGroup, run_ranks

__all__ = [
    "Comm",
    "CommError",
    "DistComm",
    "LocalComm",
    "PeerError",
    "ThreadComm",
    "ThreadGroup",
    "connect_gloo",
    "disconnect",
    "run_ranks",
]

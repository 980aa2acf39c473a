"""Communication groups: one protocol, and its implementations for one rank, threads, processes."""

from kvflow.comm.background import Background, Inline, JobTimes, Lane, Pending
from kvflow.comm.dist import DistComm, connect_gloo, disconnect
from kvflow.comm.local import LocalComm
from kvflow.comm.protocol import Comm, CommError, PeerError
from kvflow.comm.subgroup import SubComm, consecutive_group
from kvflow.comm.threads import ThreadComm, ThreadGroup, run_ranks

__all__ = [
    "Background",
    "Comm",
    "CommError",
    "DistComm",
    "Inline",
    "JobTimes",
    "Lane",
    "LocalComm",
    "PeerError",
    "Pending",
    "SubComm",
    "ThreadComm",
    "ThreadGroup",
    "connect_gloo",
    "consecutive_group",
    "disconnect",
    "run_ranks",
]

"""One rank of an engine on any host, started by torchrun or, alone, by hand:

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr A --master-port 29500 \\
        -m kvflow.launch.node --front tcp://A:5555 --key-file KEY --engine prefill-0 ...

All other flags are those of the deployment, and must be the front's.
"""

import argparse
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from attrs import frozen

from kvflow.comm import Comm
from kvflow.comm.dist import connect_gloo, disconnect
from kvflow.comm.local import LocalComm
from kvflow.engine.curve import Curve
from kvflow.engine.mailbox import ZmqMailbox
from kvflow.engine.prefill.rank import guarded
from kvflow.errors import KvflowError
from kvflow.launch.build import decode_rank, prefill_rank
from kvflow.launch.checks import check_launch
from kvflow.launch.config import LaunchConfig
from kvflow.launch.hosts import engine_ranks, read_key
from kvflow.launch.interfaces import address_of, interface_towards
from kvflow.launch.joining import facts_of, join_front
from kvflow.launch.options import parse_options
from kvflow.launch.processes import COLLECTIVE_TIMEOUT_S, IDLE_S, nixl_endpoint, require_nixl

_GRACE_S = 5.0
_START_S = 600.0


@frozen
class NodeOptions:
    """`rank` of the `size` ranks of `engine`, `local_size` of which run on this host; traffic of
    the engines goes by `interface`."""

    front: str
    key: bytes
    engine: str
    interface: str
    host_name: str
    rank: int
    size: int
    local_size: int
    start_timeout: float
    launch: LaunchConfig

    @property
    def name(self) -> str:
        """Of the rank. Raises `KvflowError` for an engine that the deployment lacks, and for
        another number of ranks than it has."""
        engines = engine_ranks(self.launch)
        if self.engine not in engines:
            raise KvflowError(f"engine {self.engine!r}, must be one of {list(engines)}")
        names = engines[self.engine]
        if self.size != len(names):
            raise KvflowError(
                f"{self.size} ranks started for engine {self.engine!r}, which has {len(names)}"
            )
        return names[self.rank]


def parse_node(
    argv: Sequence[str], environ: Mapping[str, str], *, default_model: Path
) -> NodeOptions:
    """Parses the command line; ranks are counted as torchrun says in `environ`, and one alone
    without it. Raises `KvflowError` for values that cannot be."""
    args, rest = node_parser().parse_known_args(argv)
    launch = parse_options(rest, default_model=default_model).launch
    if launch.transport != "nixl":
        raise KvflowError(f"transport {launch.transport!r}, must be 'nixl' between hosts")
    host = args.front.removeprefix("tcp://").rpartition(":")[0]
    if not host:
        raise KvflowError(f"front {args.front!r}, must be tcp://<host>:<port>")
    interface = args.interface or interface_towards(host)
    address = address_of(interface)
    return NodeOptions(
        front=args.front,
        key=read_key(args.key_file),
        engine=args.engine,
        interface=interface,
        host_name=args.host_name or address,
        rank=int(environ.get("RANK", 0)),
        size=int(environ.get("WORLD_SIZE", 1)),
        local_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
        start_timeout=args.start_timeout,
        launch=launch,
    )


def node_parser() -> argparse.ArgumentParser:
    """Of the flags that only a rank has."""
    parser = argparse.ArgumentParser(
        prog="kvflow.launch.node",
        description="One rank of an engine; other flags are those of the deployment.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--front", required=True, help="tcp://<host>:<port> of the front")
    parser.add_argument(
        "--key-file", type=Path, required=True, help="the shared secret, 16 bytes or more"
    )
    parser.add_argument("--engine", required=True, help="prefill-0, decode-0, decode-1, ...")
    parser.add_argument("--interface", help="for gloo and NIXL; default: the one towards the front")
    parser.add_argument("--host-name", help="of this host; default: the interface's address")
    parser.add_argument(
        "--start-timeout", type=float, default=_START_S, help="seconds to wait for the front"
    )
    return parser


def run_rank(options: NodeOptions) -> None:
    """Joins the front and serves until it says `Shutdown`. Raises `KvflowError` if that cannot
    be."""
    name = options.name
    check_launch(options.launch)
    settle(options.interface, options.local_size)
    require_nixl()
    mailbox = ZmqMailbox(name, options.front, Curve(options.key))
    try:
        facts = facts_of(options.launch)
        key = join_front(mailbox, options.host_name, facts, options.start_timeout)
        if mailbox.link is not None:
            mailbox.link.on_lost = _end_soon
        guarded(mailbox, lambda: _serve(options, mailbox, key))
    finally:
        mailbox.close()


def settle(interface: str, local_size: int) -> None:
    """Says to gloo and UCX which interface they use and to torch how many of this host's cores are
    this rank's, unless the user did."""
    for variable in ("GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"):
        os.environ.setdefault(variable, interface)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))


def _serve(options: NodeOptions, mailbox: ZmqMailbox, key: bytes) -> None:
    config, prefill = options.launch, options.engine.startswith("prefill")
    make_rank = prefill_rank if prefill else decode_rank
    with _group(options, COLLECTIVE_TIMEOUT_S if prefill else IDLE_S) as comm:
        run, endpoint = make_rank(config, comm, mailbox, partial(nixl_endpoint, key, config))
        with contextlib.closing(endpoint):
            run()


@contextlib.contextmanager
def _group(options: NodeOptions, timeout_s: float) -> Iterator[Comm]:
    """The ranks of the engine, which meet at torchrun's store."""
    if options.size == 1:
        yield LocalComm()
        return
    yield connect_gloo(options.rank, options.size, "env://", timeout_s=timeout_s)
    disconnect()


def _end_soon() -> None:
    """The front is gone. A rank that is just ending has a little time for it."""

    def end() -> None:
        print("kvflow.launch.node: the front is gone", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_GRACE_S, end)
    timer.daemon = True
    timer.start()


def main(argv: Sequence[str]) -> int:
    """The program. Returns its exit status."""
    try:
        run_rank(parse_node(argv, os.environ, default_model=Path("model")))
    except KvflowError as error:
        print(f"kvflow.launch.node: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        gc.freeze()  # the process ends: a last walk over all that was imported takes seconds
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

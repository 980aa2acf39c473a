"""How ranks of other hosts and their front meet, before either sends an engine's message.

A rank says who it is, where it is and from what it was started. The front answers at once, refuses
what does not fit, and welcomes all of them together when the last one is there.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
from msgspec import Struct

from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.errors import KvflowError
from kvflow.launch.config import LaunchConfig
from kvflow.models.weights import weight_files

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_ANSWER_S = 10.0
_REFUSALS = 3  # a connection may break by chance; three times in a row it does not
_FREE = {"model", "served_model_name", "transfer_costs", "disk_directory"}
_HEAD_NBYTES = 1 << 20


class Join(Struct, frozen=True, tag=True):
    """From a rank: its name, the host it runs on, and the facts that it was started from."""

    name: str
    host: str
    facts: dict[str, str]


class Noted(Struct, frozen=True, tag=True):
    """To a rank: you are heard. Wait for the others."""


class Welcome(Struct, frozen=True, tag=True):
    """To a rank: all are here. `key` seals what endpoints of this deployment tell each other."""

    key: bytes


class Refused(Struct, frozen=True, tag=True):
    """To a rank: end, for this reason."""

    why: str


_encode = msgspec.msgpack.Encoder().encode
_join = msgspec.msgpack.Decoder(Join)
_answer: msgspec.msgpack.Decoder[Noted | Welcome | Refused] = msgspec.msgpack.Decoder(
    Noted | Welcome | Refused
)


def facts_of(config: LaunchConfig) -> dict[str, str]:
    """What must be equal at the front and at every rank, by name. Paths may differ from host to
    host; of the model its configuration counts, and the sizes and first MiB of its weights.
    Raises `WeightError` if it has none."""
    facts = {k: v for k, v in _flat(attrs.asdict(config)) if k.split(".")[-1] not in _FREE}
    model = hashlib.sha256((config.model / "config.json").read_bytes())
    for path in weight_files(config.model):
        model.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            model.update(file.read(_HEAD_NBYTES))
    return facts | {"model": model.hexdigest()[:16]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value) if isinstance(value, Path) else repr(value)


# --- the front


async def gather_ranks(
    hub: ZmqHub,
    names: Iterable[str],
    facts: Mapping[str, str],
    timeout: float,
    check: Callable[[Mapping[str, str]], None],
) -> dict[str, str]:
    """Waits until every rank of `names` has joined, and welcomes them: the host of each by name.
    `check` sees these hosts first; what it raises, every rank is told. Raises `KvflowError` with
    the names of the ranks that are missing after `timeout` seconds."""
    hosts: dict[str, str] = {}
    wanted, end = set(names), time.monotonic() + timeout
    try:
        while hosts.keys() != wanted:
            if time.monotonic() > end:
                missing = sorted(wanted - hosts.keys())
                raise KvflowError(f"ranks {missing} did not join {hub.address} in {timeout} s")
            await _take(hub, wanted, facts, hosts)
            for name in [name for name in hosts if not hub.is_connected(name)]:
                del hosts[name]  # it has ended; another of its name may come
        check(hosts)
    except KvflowError as error:
        _tell(hub, hosts, Refused(str(error)))
        raise
    _tell(hub, hosts, Welcome(secrets.token_bytes(32)))
    return hosts


async def _take(
    hub: ZmqHub, wanted: set[str], facts: Mapping[str, str], hosts: dict[str, str]
) -> None:
    """One rank that joins, if one does soon."""
    try:
        name, data = await asyncio.wait_for(hub.receive_bytes(), _LOOK_S)
    except TimeoutError:
        return
    try:
        join = _join.decode(data)
    except msgspec.DecodeError as error:
        raise KvflowError(f"rank {name!r} sent what is no wish to join: {error}") from error
    if why := _objection(join, wanted, facts):
        _log.warning("rank %r on host %r is refused: %s", name, join.host, why)
        _tell(hub, [name], Refused(why))
        return
    hosts[name] = join.host
    _tell(hub, [name], Noted())


def _objection(join: Join, wanted: set[str], facts: Mapping[str, str]) -> str | None:
    if join.name not in wanted:
        return f"the front knows no rank {join.name!r}, it waits for {sorted(wanted)}"
    names = sorted(facts.keys() | join.facts.keys())
    other = [n for n in names if facts.get(n) != join.facts.get(n)]
    if not other:
        return None
    pairs = "; ".join(f"{n} {join.facts.get(n)}, at the front {facts.get(n)}" for n in other)
    return f"rank {join.name!r} was started from another configuration: {pairs}"


def _tell(hub: ZmqHub, names: Iterable[str], answer: Noted | Welcome | Refused) -> None:
    for name in names:
        with contextlib.suppress(KvflowError):  # it is gone already
            hub.send_bytes(name, _encode(answer))


# --- a rank


def join_front(mailbox: ZmqMailbox, host: str, facts: dict[str, str], timeout: float) -> bytes:
    """Joins the front; returns the key of the deployment's endpoints. Raises `KvflowError` if there
    is no front within `timeout` seconds, if it holds another key, refuses or is lost."""
    mailbox.send_bytes(_encode(Join(mailbox.name, host, facts)))
    end, noted = time.monotonic() + timeout, False
    while True:
        for data in mailbox.receive_bytes(_LOOK_S):
            match _answer.decode(data):
                case Welcome(key):
                    return key
                case Refused(reason):
                    raise KvflowError(reason)
                case Noted():
                    noted = True
        if why := _vain(mailbox, noted, time.monotonic() > end):
            raise KvflowError(f"rank {mailbox.name!r}: the front at {mailbox.address} {why}")


def _vain(mailbox: ZmqMailbox, noted: bool, late: bool) -> str | None:
    """Why waiting on would be in vain."""
    link = mailbox.link
    if link is None:
        return None
    if link.lost:
        return "is gone"
    if link.up_at is None:
        if link.num_refused >= _REFUSALS:
            return "holds another key"
        return "cannot be reached" if late else None
    unheard = not noted and time.monotonic() - link.up_at > _ANSWER_S
    return "does not answer; another rank of this name is connected" if unheard else None

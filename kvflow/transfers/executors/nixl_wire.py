"""What NIXL endpoints say to each other: sealed MessagePack, addresses as plain integers."""

import msgspec
import numpy as np

from kvflow.errors import KvflowError, TransferError
from kvflow.layouts.pieces import Heads
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.seal import seal, unseal
from kvflow.transfers.lower import PageGeometry, SlotRuns


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered bytes of an endpoint."""

    address: int
    nbytes: int


class PagesInfo(msgspec.Struct, frozen=True, array_like=True):
    """A `PageGeometry` in words, and the region it must lie in."""

    fields: tuple[tuple[str, str, int, int], ...]
    arrangement: str
    block_size: int
    base: int
    block_stride: int
    num_blocks: int
    region: Region


class Export(msgspec.Struct, frozen=True, tag="export"):
    """One endpoint: enough to read its cache and to talk to it. Of two exports with one `label`
    the higher `generation` (ns) is the living one."""

    name: str
    label: str
    generation: int
    rank: int
    agent: bytes
    components: dict[str, PagesInfo]
    staging: Region


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A reader presents itself so that its requests can be answered."""

    id: int
    export: bytes


class Pack(msgspec.Struct, frozen=True, tag="pack"):
    """Put the rows of `components`, one component after the other, at the slots of `runs` into
    staging, and keep them there until `Release` or for `lease` seconds: by then the reader has
    given up."""

    id: int
    components: tuple[str, ...]
    runs: bytes
    lease: float
    heads: Heads | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The rows packed for request `id` have been read."""

    id: int


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Hash the rows of each component at the slots of `runs`."""

    id: int
    components: tuple[str, ...]
    runs: bytes
    heads: Heads | None = None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers `Hello`."""

    id: int


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """Answers `Pack`: the rows begin at `offset` of the staging region."""

    id: int
    offset: int


class Digested(msgspec.Struct, frozen=True, tag="digested"):
    """Answers `Digest`, in the order of its components."""

    id: int
    digests: tuple[bytes, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Answers any request that will not be served."""

    id: int
    reason: str


Request = Hello | Pack | Release | Digest
Reply = Welcome | Packed | Digested | Refused
Message = Request | Reply

_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_exports = msgspec.msgpack.Decoder(Export)


def encode(key: bytes, message: Message | Export) -> bytes:
    return seal(key, msgspec.msgpack.encode(message))


def decode(key: bytes, sealed: bytes) -> Message:
    """Raises `TransferError` for a bad seal or anything that is no message."""
    try:
        return _messages.decode(unseal(key, sealed))
    except msgspec.MsgspecError as e:
        raise TransferError(f"a sealed blob of {len(sealed)} bytes is no message: {e}") from e


def decode_export(key: bytes, sealed: bytes) -> Export:
    """Raises `TransferError` for a bad seal or anything that is no export."""
    try:
        return _exports.decode(unseal(key, sealed))
    except msgspec.MsgspecError as e:
        raise TransferError(f"a sealed blob of {len(sealed)} bytes is no export: {e}") from e


def pages_info(geometry: PageGeometry, region: Region) -> PagesInfo:
    record = geometry.record
    return PagesInfo(
        tuple((f.name, f.dtype, f.num_elements, f.num_heads) for f in record.fields),
        str(record.arrangement),
        geometry.block_size,
        geometry.base,
        geometry.block_stride,
        geometry.num_blocks,
        region,
    )


def geometry_of(component: str, info: PagesInfo) -> PageGeometry:
    """The geometry. Raises `TransferError` if it is unlawful or leaves its region."""
    try:
        record = Record(tuple(Field(*f) for f in info.fields), info.arrangement)
        geometry = PageGeometry(
            record, info.block_size, info.base, info.block_stride, info.num_blocks
        )
    except KvflowError as e:
        raise TransferError(f"the peer's {component}: {e}") from e
    region = info.region
    end, region_end = geometry.base + geometry.nbytes, region.address + region.nbytes
    if geometry.base < region.address or end > region_end:
        raise TransferError(
            f"the peer's {component} pages [{geometry.base:#x}, {end:#x}) must lie inside "
            f"its region [{region.address:#x}, {region_end:#x})"
        )
    return geometry


def pack_runs(runs: SlotRuns) -> bytes:
    """The source side of runs, neighbours joined: 24 bytes a run."""
    src, stride, count = runs.src, runs.src_stride, runs.count
    plain = (stride == 1) | (count == 1)
    glued = plain[1:] & plain[:-1] & (src[1:] == src[:-1] + count[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~glued])[: len(src)])
    table = np.stack([src[first], stride[first], np.add.reduceat(count, first)], axis=1)
    return table.astype("<i8").tobytes()


def unpack_slots(data: bytes) -> Ints:
    """The slots that `pack_runs` described. Raises `TransferError` for bytes that are no runs."""
    if not data or len(data) % 24:
        raise TransferError(f"runs of {len(data)} bytes, must be a positive multiple of 24")
    src, stride, count = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 3).T
    if count.min() < 1 or count.max() > 2**40 or int(count.sum()) > 2**40:
        raise TransferError(f"runs count {int(count.min())}..{int(count.max())} tokens each")
    which = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return np.ascontiguousarray(src[which] + nth * stride[which])

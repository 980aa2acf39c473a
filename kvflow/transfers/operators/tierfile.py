"""The file of one rank in a file tier: what it holds, where it lies, digests of every block.

``magic, header size, header, digest of the header``, then the blocks of each group. A block is the
pages of all components of the group one behind the other, so a restore reads and proves only the
blocks that its plan touches. Blocks that nobody wrote (those of a prefix that is stored elsewhere)
are holes. A file is written once: under another name first, complete and synchronised before its
own name exists.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.errors import KvflowError, TransferError
from kvflow.kernels.rows import PageView
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.sharding import Ints
from kvflow.layouts.values import integer, names
from kvflow.layouts.wire import layout_from_wire, layout_to_wire
from kvflow.transfers.executors.base import RankCache

MAGIC = b"kvflow.tier.1\n"
_SIZE_NBYTES, _DIGEST_NBYTES = 8, 16
_MALFORMED = (KvflowError, AttributeError, KeyError, TypeError, ValueError, RecursionError)
_ALIGNMENT = 4096
_NOTHING: Ints = np.empty(0, np.int64)

Digests = dict[str, dict[int, bytes]]
"""Of every block that was written, by group."""


@frozen(eq=False)
class Contents:
    """What a file holds: the tokens ``[start, stop)`` of `components` as rank `rank` of `layout`
    stores them. `num_blocks` is by group; entry i of a block table is block i."""

    key: str
    rank: int
    layout: KVLayout
    tokens: tuple[int, int]
    components: tuple[str, ...]
    num_blocks: Mapping[str, int]

    @property
    def groups(self) -> tuple["GroupRegion", ...]:
        """The regions of the file's payload, one behind the other."""
        regions, at = [], 0
        held = set(self.components) & set(self.layout.components_of(self.rank))
        for group in self.layout.groups:
            names = tuple(c for c in group.components if c in held)
            region = GroupRegion(
                self.layout, self.rank, group, names, self.num_blocks[group.name], at
            )
            regions.append(region)
            at += region.nbytes
        return tuple(regions)

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.groups)


@frozen(eq=False)
class GroupRegion:
    """The blocks of one group, from byte `start` of the payload on."""

    layout: KVLayout
    rank: int
    group: CacheGroup
    names: tuple[str, ...]
    num_blocks: int
    start: int

    @property
    def page_nbytes(self) -> dict[str, int]:
        size = self.group.paging.block_size
        records = {n: self.layout.local_record(n, self.rank) for n in self.names}
        return {name: record.page_pitch(size) for name, record in records.items()}

    @property
    def block_nbytes(self) -> int:
        return sum(self.page_nbytes.values())

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes

    def views(self, payload: Tensor) -> dict[str, PageView]:
        """The pages of the group in a payload: uint8 [payload bytes]."""
        views, at, size = {}, self.start, self.group.paging.block_size
        for name, page in self.page_nbytes.items():
            record = self.layout.local_record(name, self.rank)
            views[name] = PageView(payload, record, size, self.block_nbytes, at)
            at += page
        return views

    def blocks(self, payload: Tensor, which: Ints) -> Iterator[tuple[int, int, memoryview]]:
        """(block, place in the payload, its bytes) of some blocks."""
        memory = payload.numpy().data
        for block in which.tolist():
            at = self.start + block * self.block_nbytes
            yield block, at, memory[at : at + self.block_nbytes]


def empty_cache(contents: Contents) -> tuple[Tensor, RankCache]:
    """Memory for a file's payload, zeroed where nothing is written later, and its pages."""
    payload = torch.zeros(contents.nbytes, dtype=torch.uint8)
    views = {}
    for region in contents.groups:
        if region.num_blocks:
            views.update(region.views(payload))
    return payload, RankCache(contents.rank, views)


def write_file(
    path: Path, contents: Contents, payload: Tensor, written: Mapping[str, Ints]
) -> None:
    """Creates the file with the blocks that were written, by group. Raises `TransferError` if
    there is a file already."""
    pieces = [
        (region.group.name, *piece)
        for region in contents.groups
        for piece in region.blocks(payload, written.get(region.group.name, _NOTHING))
    ]
    digests: Digests = {region.group.name: {} for region in contents.groups}
    for group, block, _, data in pieces:
        digests[group][block] = _digest(data)
    header = json.dumps(_header(contents, digests), sort_keys=True).encode()
    head = MAGIC + len(header).to_bytes(_SIZE_NBYTES, "little") + header + _digest(header)
    start = _payload_start(len(head))
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            os.ftruncate(fd, start + contents.nbytes)
            _write_all(fd, memoryview(head), 0)
            for _, _, at, data in pieces:
                _write_all(fd, data, start + at)
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise TransferError(
                f"{path} exists: what is stored under a key does not change"
            ) from None
    finally:
        draft.unlink(missing_ok=True)
    with _opened(path.parent, os.O_RDONLY) as fd:
        os.fsync(fd)


@frozen(eq=False)
class TierFile:
    """A file that was found, its header proven."""

    path: Path
    contents: Contents
    start: int
    _digests: Digests = field(repr=False)

    def read(self, wanted: Mapping[str, Ints]) -> RankCache:
        """A cache in which the wanted blocks (by group) hold what was written, all others zeros.
        Raises `TransferError` for a short file or a block that was not written so, or at all."""
        payload, cache = empty_cache(self.contents)
        with _opened(self.path, os.O_RDONLY) as fd:
            for region in self.contents.groups:
                name = region.group.name
                for block, at, data in region.blocks(payload, wanted.get(name, _NOTHING)):
                    _read_all(fd, data, self.start + at, self.path)
                    if _digest(data) != self._digests[name].get(block):
                        raise TransferError(
                            f"{self.path}: block {block} of group {name!r} is not what was "
                            f"written there"
                        )
        return cache


def open_file(path: Path, key: str, rank: int) -> TierFile:
    """Reads and proves the header. Raises `TransferError` for a file that is missing, short,
    damaged, of another version or of another key or rank."""
    with _opened(path, os.O_RDONLY) as fd:
        fixed = bytearray(len(MAGIC) + _SIZE_NBYTES)
        _read_all(fd, memoryview(fixed), 0, path)
        if fixed[: len(MAGIC)] != MAGIC:
            raise TransferError(f"{path} is no file of this tier: it begins {bytes(fixed[:14])!r}")
        size, actual = int.from_bytes(fixed[len(MAGIC) :], "little"), os.fstat(fd).st_size
        head_nbytes = len(fixed) + size + _DIGEST_NBYTES
        if head_nbytes > actual:
            raise TransferError(f"{path} has {actual} bytes, its header alone needs {head_nbytes}")
        header = bytearray(size + _DIGEST_NBYTES)
        _read_all(fd, memoryview(header), len(fixed), path)
    if _digest(header[:size]) != header[size:]:
        raise TransferError(f"{path}: the header is not what was written")
    contents, digests = _parse(path, bytes(header[:size]))
    if (contents.key, contents.rank) != (key, rank):
        raise TransferError(
            f"{path} holds rank {contents.rank} of {contents.key!r}, not rank {rank} of {key!r}"
        )
    start = _payload_start(head_nbytes)
    if actual != start + contents.nbytes:
        raise TransferError(f"{path} has {actual} bytes, its header says {start + contents.nbytes}")
    return TierFile(path, contents, start, digests)


def _header(contents: Contents, digests: Digests) -> dict[str, Any]:
    return {
        "key": contents.key,
        "rank": contents.rank,
        "layout": layout_to_wire(contents.layout),
        "tokens": list(contents.tokens),
        "components": list(contents.components),
        "num_blocks": dict(contents.num_blocks),
        "digests": {
            name: [[block, d.hex()] for block, d in each.items()] for name, each in digests.items()
        },
    }


def _parse(path: Path, text: bytes) -> tuple[Contents, Digests]:
    try:
        header: dict[str, Any] = json.loads(text)
        digests = {
            name: {block: bytes.fromhex(d) for block, d in each}
            for name, each in header["digests"].items()
        }
        start, stop = header["tokens"]
        contents = Contents(
            header["key"],
            integer(header["rank"], "rank"),
            layout_from_wire(header["layout"]),
            (integer(start, "start"), integer(stop, "stop")),
            names(header["components"]),
            {name: integer(n, "num_blocks") for name, n in header["num_blocks"].items()},
        )
        if missing := {region.group.name for region in contents.groups} - digests.keys():
            raise KeyError(f"digests of {sorted(missing)}")
    except _MALFORMED as error:
        raise TransferError(f"{path}: a header of another version: {error!r}") from error
    return contents, digests


def _payload_start(head_nbytes: int) -> int:
    return -(-head_nbytes // _ALIGNMENT) * _ALIGNMENT


def _digest(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def _read_all(fd: int, data: memoryview, at: int, path: Path) -> None:
    done = 0
    while done < len(data):
        try:
            count = os.preadv(fd, [data[done:]], at + done)
        except OSError as error:  # a directory opens, but cannot be read
            raise TransferError(f"{path} cannot be read: {error.strerror}") from error
        if not count:
            raise TransferError(
                f"{path} ends at byte {at + done}, {len(data) - done} more were expected"
            )
        done += count

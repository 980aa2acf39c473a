"""The file of one unit in the disk tier: what it holds, a digest of it, and the unit's bytes.

``magic, header size, header, digest of the header``, then the unit at a multiple of 4096. A file is
complete and synchronised before its own name exists, so a crash leaves none that is half written.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen
from torch import Tensor

from kvflow.engine.prefix.hashes import HASH_SCHEME
from kvflow.engine.tiers.directory import draft_of
from kvflow.engine.tiers.host import Entry, Place
from kvflow.errors import TransferError

MAGIC = b"kvflow.unit.2\n"
_SIZE_NBYTES, _DIGEST_NBYTES, _TOKEN_NBYTES = 8, 32, 8
_ALIGNMENT = 4096
_MOST_HEADER = 1 << 26


class FileMover(Protocol):
    """Moves uint8 memory to and from open files. Blocks; several threads may call it at once."""

    def write(self, fd: int, offset: int, data: Tensor) -> None:
        """Every byte is written to the file. Raises `TransferError`."""
        ...

    def read(self, fd: int, offset: int, data: Tensor) -> None:
        """Every byte comes from the file. Raises `TransferError`, for a short file too."""
        ...


class BrokenUnitError(TransferError):
    """What was read of a file proves that it is none of this tier's, or is damaged."""


@frozen(eq=False)
class UnitFile:
    """A file whose header is proven; the unit is `nbytes` long and begins at byte `start`."""

    path: Path
    entry: Entry
    nbytes: int
    start: int
    digest: bytes

    @property
    def file_nbytes(self) -> int:
        return self.start + self.nbytes

    def read(self, files: FileMover, data: Tensor) -> None:
        """Fills uint8 `data` with the unit. Raises `TransferError` if that is not what was written:
        then `data` holds nothing provable."""
        if data.numel() != self.nbytes:
            raise TransferError(f"{self.path} holds {self.nbytes} bytes, wanted {data.numel()}")
        fd = _open(self.path, os.O_RDONLY)
        try:
            files.read(fd, self.start, data)
        finally:
            os.close(fd)
        if _digest(data) != self.digest:
            raise TransferError(f"{self.path}: the unit is not what was written")


def write_unit(path: Path, entry: Entry, data: Tensor, files: FileMover) -> UnitFile:
    """Creates, or replaces, the file of a unit. Raises `TransferError` and leaves none behind."""
    digest = _digest(data)
    head = _head(entry, data.numel(), digest)
    start = _payload_start(len(head))
    try:
        with draft_of(path) as (draft, fd):
            os.truncate(fd, start + data.numel())
            if os.pwrite(fd, head, 0) != len(head):
                raise TransferError(f"{draft}: no room for the header")
            files.write(fd, start, data)
            os.fsync(fd)
            os.replace(draft, path)
    except OSError as error:
        raise TransferError(f"{path} cannot be written: {error}") from error
    return UnitFile(path, entry, data.numel(), start, digest)


def most_file_nbytes(nbytes: int, unit_size: int) -> int:
    """At most so many bytes has the file of a unit of `nbytes` bytes and `unit_size` tokens."""
    place = Place(bytes(_DIGEST_NBYTES), 2**63 - 1)
    entry = Entry(place, bytes(unit_size * _TOKEN_NBYTES), *[bytes(_DIGEST_NBYTES)] * 2)
    return _payload_start(len(_head(entry, nbytes, bytes(_DIGEST_NBYTES)))) + nbytes


def open_unit(path: Path) -> UnitFile:
    """Reads and proves the header of a file. Raises `TransferError` for one that is missing or
    cannot be read, `BrokenUnitError` for a short, damaged or foreign one, or another hash scheme.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        fixed = os.pread(fd, len(MAGIC) + _SIZE_NBYTES, 0)
        size = int.from_bytes(fixed[len(MAGIC) :], "little")
        if fixed[: len(MAGIC)] != MAGIC or size > _MOST_HEADER:
            raise BrokenUnitError(f"{path} is no file of this tier: it begins {fixed!r}")
        rest = os.pread(fd, size + _DIGEST_NBYTES, len(fixed))
        actual = os.fstat(fd).st_size
    except OSError as error:
        raise TransferError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(fd)
    header, digest = rest[:size], rest[size:]
    if hashlib.sha256(header).digest() != digest:
        raise BrokenUnitError(f"{path}: the header is not what was written")
    start = _payload_start(len(fixed) + len(rest))
    try:
        file = _parse(path, json.loads(header), start)
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenUnitError(f"{path}: a header of another version: {error!r}") from error
    if actual != file.file_nbytes:
        raise BrokenUnitError(f"{path} has {actual} bytes, its header says {file.file_nbytes}")
    return file


def _head(entry: Entry, nbytes: int, digest: bytes) -> bytes:
    said = {
        "scheme": HASH_SCHEME,
        "hash": entry.place.hash.hex(),
        "following": entry.place.following,
        "parent": entry.parent.hex() if entry.parent is not None else None,
        "tokens": entry.tokens.hex(),
        "label": entry.label.hex(),
        "nbytes": nbytes,
        "digest": digest.hex(),
    }
    header = json.dumps(said, sort_keys=True).encode()
    head = MAGIC + len(header).to_bytes(_SIZE_NBYTES, "little") + header
    return head + hashlib.sha256(header).digest()


def _parse(path: Path, said: dict[str, Any], start: int) -> UnitFile:
    if said["scheme"] != HASH_SCHEME:
        raise BrokenUnitError(f"{path} is hashed by {said['scheme']!r}, here by {HASH_SCHEME!r}")
    following, parent = said["following"], said["parent"]
    place = Place(bytes.fromhex(said["hash"]), None if following is None else int(following))
    before = bytes.fromhex(parent) if parent is not None else None
    entry = Entry(place, bytes.fromhex(said["tokens"]), bytes.fromhex(said["label"]), before)
    return UnitFile(path, entry, int(said["nbytes"]), start, bytes.fromhex(said["digest"]))


def _payload_start(head_nbytes: int) -> int:
    return -(-head_nbytes // _ALIGNMENT) * _ALIGNMENT


def _digest(data: Tensor) -> bytes:
    return hashlib.blake2b(data.numpy().data, digest_size=_DIGEST_NBYTES).digest()


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error.strerror}") from error

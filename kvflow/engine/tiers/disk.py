"""DiskTier: which units lie in files of a directory, within a number of bytes.

The index is read from the files themselves when the tier is opened, so it survives a restart, and a
file is served only if it proves what it holds. One that proves to be broken, or was left half
written by an engine that was killed, is deleted; what is not named as a file of a tier stays.
"""

import contextlib
import os
from pathlib import Path

from attrs import define, field
from torch import Tensor

from kvflow.engine.prefix.hashes import HASH_SCHEME, Chain
from kvflow.engine.tiers.directory import agree_on, remove_drafts, unit_files
from kvflow.engine.tiers.host import Entry, Place
from kvflow.engine.tiers.unitfile import (
    BrokenUnitError,
    FileMover,
    UnitFile,
    most_file_nbytes,
    open_unit,
    write_unit,
)
from kvflow.errors import CapacityError, TransferError
from kvflow.router.events import EventBuffer


@define(eq=False)
class DiskTier:
    """Files of at most `nbytes` bytes in `directory`; the one left alone the longest goes first.
    The index belongs to one thread, `read` and `write` may run in others. Several engines may use
    one directory; each bounds the files it has indexed, those of others as of its opening. Files
    that may not be read are left to whoever may, and not counted. Raises what `agree_on` raises."""

    directory: Path
    nbytes: int
    unit_size: int
    files: FileMover
    num_stored: int = field(init=False, default=0)
    num_evicted: int = field(init=False, default=0)
    num_refused: int = field(init=False, default=0)
    num_store_refused: int = field(init=False, default=0)
    held_nbytes: int = field(init=False, default=0)
    events: EventBuffer = field(init=False)
    _files: dict[Place, UnitFile] = field(init=False, factory=dict)
    _variants: dict[bytes, set[Place]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.events = EventBuffer("disk", self.unit_size)
        self.directory.mkdir(parents=True, exist_ok=True)
        agree_on(self.directory, {"hash_scheme": HASH_SCHEME, "block_size": self.unit_size})
        remove_drafts(self.directory)
        found = []
        for path in unit_files(self.directory):
            try:
                found.append((path.stat().st_mtime_ns, open_unit(path)))
            except BrokenUnitError:
                self.num_refused += 1
                _remove(path)
            except (TransferError, OSError):
                self.num_refused += 1
        for _, file in sorted(found, key=lambda each: each[0]):
            self._index(file)
        self._shrink(0)

    # --- the index

    def find(self, chain: Chain, k: int, following: int | None) -> UnitFile | None:
        """The file of block k of a chain, proven by tokens and label; that is a use of it."""
        place = Place(chain.hashes[k], following)
        file = self._files.get(place)
        if file is None or file.entry.tokens != chain.block(k):
            return None
        if file.entry.label != chain.label(k, following):
            return None
        self._files[place] = self._files.pop(place)
        with contextlib.suppress(OSError):
            os.utime(file.path)
        return file

    def variant(self, chain: Chain, k: int) -> UnitFile | None:
        """Any file of block k, whatever token its last row was made with."""
        for place in self._variants.get(chain.hashes[k], ()):
            if (file := self.find(chain, k, place.following)) is not None:
                return file
        return None

    def has(self, place: Place) -> bool:
        return place in self._files

    def make_room(self, nbytes: int) -> None:
        """Deletes the oldest files until a unit of `nbytes` fits. Raises `CapacityError`, and
        counts a refused store, if it never does."""
        need = most_file_nbytes(nbytes, self.unit_size)
        if need > self.nbytes:
            self.num_store_refused += 1
            raise CapacityError(f"a file of {need} bytes, the disk tier has {self.nbytes}")
        self._shrink(need)

    def _shrink(self, spare: int) -> None:
        while self._files and self.held_nbytes + spare > self.nbytes:
            self._delete(next(iter(self._files)))
            self.num_evicted += 1

    def publish(self, file: UnitFile) -> None:
        """A file is written: from now on it is found."""
        self._index(file)
        self.num_stored += 1
        self._shrink(0)

    def refuse(self, file: UnitFile) -> None:
        """The file did not hold what it should: it is found no more, and deleted, unless another
        engine has put one of its own there in the meantime."""
        self.num_refused += 1
        if self._files.get(file.entry.place) is not file:
            return
        self._forget(file.entry.place)
        with contextlib.suppress(TransferError):
            theirs = open_unit(file.path)
            if theirs.digest != file.digest:
                self._index(theirs)
                self._shrink(0)
                return
        _remove(file.path)

    def drop(self, file: UnitFile) -> None:
        """The file is found no more, and deleted."""
        self._delete(file.entry.place)

    def clear(self) -> int:
        """Deletes every indexed file; returns how many there were."""
        count = len(self._files)
        for place in list(self._files):
            self._delete(place)
        return count

    def __len__(self) -> int:
        return len(self._files)

    def _index(self, file: UnitFile) -> None:
        place = file.entry.place
        if place in self._files and (before := self._forget(place)).path != file.path:
            _remove(before.path)
        self._files[place] = file
        self._variants.setdefault(place.hash, set()).add(place)
        self.events.stored(place.hash, file.entry.parent)
        self.held_nbytes += file.file_nbytes

    def _forget(self, place: Place) -> UnitFile:
        file = self._files.pop(place)
        self.held_nbytes -= file.file_nbytes
        self._variants[place.hash].discard(place)
        if not self._variants[place.hash]:
            del self._variants[place.hash]
            self.events.removed(place.hash)
        return file

    def _delete(self, place: Place) -> None:
        _remove(self._forget(place).path)

    # --- files

    def write(self, key: bytes, entry: Entry, data: Tensor) -> UnitFile:
        """Writes a unit's file; its name is the key. Raises `TransferError`."""
        return write_unit(self.directory / f"{key.hex()}.unit", entry, data, self.files)

    def read(self, file: UnitFile, data: Tensor) -> None:
        """Fills `data` with a file's unit, proven. Raises `TransferError`."""
        file.read(self.files, data)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else was faster
        path.unlink()

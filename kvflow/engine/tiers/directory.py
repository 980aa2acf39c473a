"""The directory of a disk tier: which names in it are the tier's own, drafts, and the manifest.

Several engines may use one directory at once. A file is written under a draft's name and locked by
its writer until it has its own; the lock (flock) ends with the writer, so a draft that nobody has
locked was left by one that was killed, however short ago.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvflow.errors import KvflowError

MANIFEST = "tier.json"
_UNIT = re.compile(r"[0-9a-f]{64}\.unit")
_DRAFT = re.compile(r"\.([0-9a-f]{64}\.unit|tier\.json)\.[0-9a-f]{16}")


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside `path` and its descriptor, locked inside the block, in which the caller
    writes it and gives it its own name; if not, it is gone behind the block. Raises `OSError`."""
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # no locks here: then nobody removes drafts either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # else it was taken for a leftover before it was locked
                yield draft, fd
                return
        finally:
            draft.unlink(missing_ok=True)
            os.close(fd)


def unit_files(directory: Path) -> list[Path]:
    """What is named as a unit's file, and is a file."""
    return [path for path in directory.iterdir() if _UNIT.fullmatch(path.name) and _is_file(path)]


def remove_drafts(directory: Path) -> None:
    """Removes the drafts of writers that are no more. Where a file system has no locks, all drafts
    stay."""
    for path in directory.iterdir():
        if _DRAFT.fullmatch(path.name) and _is_file(path):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)


def agree_on(directory: Path, settings: Mapping[str, object]) -> None:
    """The directory's settings are these, or are set so if it has none; of several that come at
    once the first sets them. A manifest that was cut off, as by a crash, is replaced if no unit's
    file is there. Raises `KvflowError` for other settings, naming the one that differs, and for a
    manifest that cannot be made, read or replaced."""
    path = directory / MANIFEST
    try:
        _create(path, settings)
        text = path.read_bytes()
        if _is_cut_off(text) and not unit_files(directory):
            _replace(path, settings)
            text = path.read_bytes()
    except OSError as error:
        raise KvflowError(f"disk tier {directory}: no manifest {MANIFEST}: {error}") from error
    try:
        theirs = json.loads(text)
    except ValueError as error:
        raise KvflowError(
            f"{path} is no manifest of a disk tier ({error}): delete it, and the *.unit files "
            f"beside it, if nothing else uses them"
        ) from error
    for name, value in settings.items():
        if not isinstance(theirs, dict) or theirs.get(name) != value:
            said = theirs.get(name) if isinstance(theirs, dict) else theirs
            raise KvflowError(
                f"disk tier {directory}: {name} is {said!r} there and {value!r} here; no key would "
                f"ever match"
            )


def _create(path: Path, settings: Mapping[str, object]) -> None:
    """A link fails where a name exists: the first of several stays."""
    if path.exists():
        return
    with draft_of(path) as (draft, fd):
        _write(fd, settings)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)


def _replace(path: Path, settings: Mapping[str, object]) -> None:
    """Whoever comes second waits, and finds another file, or another content, in its place."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        is_there = os.path.samestat(os.fstat(fd), os.stat(path))
        if is_there and _is_cut_off(path.read_bytes()):
            with draft_of(path) as (draft, fresh):
                _write(fresh, settings)
                os.replace(draft, path)
    finally:
        os.close(fd)


def _write(fd: int, settings: Mapping[str, object]) -> None:
    os.write(fd, json.dumps(settings).encode())
    os.fsync(fd)


def _is_cut_off(text: bytes) -> bool:
    """Whether it is the beginning of a manifest, without its end."""
    begin = b'{"hash_scheme": '
    return not text.endswith(b"}") and (text.startswith(begin) or begin.startswith(text))


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False

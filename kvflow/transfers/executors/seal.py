"""Sealed messages and payload digests: what endpoints trust, and how they compare bytes.

A seal proves that a blob was made by somebody who holds the shared secret; it hides nothing and it
orders nothing. It is checked before a byte of the blob is interpreted.
"""

import hashlib
import hmac

import torch

from kvflow.errors import TransferError
from kvflow.kernels.rows import PageView, gather_rows
from kvflow.layouts.pieces import Heads
from kvflow.layouts.sharding import Ints

SEAL_NBYTES = 32
MIN_KEY_NBYTES = 16
_ROWS_AT_ONCE = 4096


def check_key(key: bytes) -> bytes:
    """The key itself. Raises `TransferError` for anything but 16 or more bytes."""
    if not isinstance(key, bytes) or len(key) < MIN_KEY_NBYTES:
        size = len(key) if isinstance(key, bytes) else type(key).__name__
        raise TransferError(f"the shared secret must be at least {MIN_KEY_NBYTES} bytes, is {size}")
    return key


def seal(key: bytes, blob: bytes) -> bytes:
    """HMAC-SHA256 of the blob, then the blob."""
    return hmac.digest(key, blob, "sha256") + blob


def unseal(key: bytes, sealed: bytes) -> bytes:
    """The blob. Raises `TransferError` if the seal does not fit."""
    mark, blob = bytes(sealed[:SEAL_NBYTES]), bytes(sealed[SEAL_NBYTES:])
    if not hmac.compare_digest(mark, hmac.digest(key, blob, "sha256")):
        raise TransferError(f"a blob of {len(sealed)} bytes has a bad seal: refused unread")
    return blob


def digest_rows(pages: PageView, slots: Ints, heads: Heads | None = None) -> bytes:
    """blake2b (16 bytes) over the packed rows of `slots` in some of the heads that the pages store
    (default: all), in their order: equal tokens give equal digests whatever the arrangement of the
    pages."""
    h = hashlib.blake2b(digest_size=16)
    index = torch.from_numpy(slots)
    for start in range(0, len(slots), _ROWS_AT_ONCE):
        h.update(gather_rows(pages, index[start : start + _ROWS_AT_ONCE], heads=heads).numpy().data)
    return h.digest()

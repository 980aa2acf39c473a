"""Chained content hashes of token blocks: equal in any process and on any machine.

A chain is rooted in what the rows mean (the content fingerprint), the tenant's salt and the
adapter; each block's hash covers its parent's, so it stands for all tokens up to its end. Every
field is hashed with its kind and length, so no two different statements share their bytes.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen

from kvflow.layouts.sharding import Ints
from kvflow.layouts.values import integer, positive

HASH_SCHEME = "kvflow.prefix.1 sha256 int64"
"""Names how chains are hashed; engines that share a tier must agree on it."""

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """The digest of chains, 32 bytes."""
    return hashlib.sha256(data).digest()


def _label(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=b"kvflow.label").digest()


def said(*fields: bytes | str | int | None) -> bytes:
    """Fields in a form in which different lists differ: kind, length, then content."""
    parts = []
    for one in fields:
        match one:
            case None:
                parts.append(b"n;")
            case str():
                text = one.encode("utf-8", "surrogatepass")
                parts.append(b"s%d:%b" % (len(text), text))
            case bytes():
                parts.append(b"b%d:%b" % (len(one), one))
            case _:
                parts.append(b"i%d;" % one)
    return b"".join(parts)


@frozen(eq=False)
class Chain:
    """The full blocks of one prompt. ``hashes[k]`` stands for the tokens ``[0, (k+1)*block_size)``
    and is what indexes go by; ``labels[k]`` says the same in a second, independent digest, which
    is stored with the rows and proves them. `shifted`: a block's last row depends on the token
    behind the block too (the MTP layer's row of position t is made with token t + 1)."""

    tokens: Ints
    block_size: int
    shifted: bool
    hashes: tuple[bytes, ...]
    labels: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.hashes)

    def stop(self, k: int) -> int:
        """The position behind block k."""
        return (k + 1) * self.block_size

    def parent(self, k: int) -> bytes | None:
        """The hash of the block before block k, None for the first."""
        return self.hashes[k - 1] if k else None

    def block(self, k: int) -> bytes:
        """The tokens of a block, as int64 bytes."""
        return self.tokens[k * self.block_size : self.stop(k)].tobytes()

    def following(self, k: int, sampled: int | None = None) -> int | None:
        """The token that the last row of block k was, or will be, made with: `sampled` behind the
        prompt, None where rows do not depend on it. Raises `LookupError` if it is not known."""
        if not self.shifted:
            return None
        if self.stop(k) < len(self.tokens):
            return int(self.tokens[self.stop(k)])
        if sampled is None:
            raise LookupError(f"nobody has sampled the token behind position {self.stop(k) - 1}")
        return sampled

    def key(self, k: int, following: int | None) -> bytes:
        """Names the rows of block k in a tier: 32 bytes."""
        return sha256(said("rows", self.hashes[k], following))

    def label(self, k: int, following: int | None) -> bytes:
        """Proves the rows of block k, by digests that no index goes by: 32 bytes."""
        return _label(said("rows", self.labels[k], following))


@frozen(eq=False)
class PrefixHasher:
    """Chains of one engine. `content` is the fingerprint of what its rows mean, `block_size` the
    granularity of hits in tokens, `shifted` as in `Chain`."""

    content: str
    block_size: int = field(converter=integer, validator=positive)
    shifted: bool = False
    digest: Digest = sha256

    def chain(
        self, prompt: Sequence[int], salt: str | None = None, adapter: str | None = None
    ) -> Chain:
        """The chain of a prompt. Prompts of different tenants (`salt`) or adapters share none."""
        tokens = np.array(prompt, "<i8")
        root = said(HASH_SCHEME, self.content, self.block_size, salt, adapter)
        parent, label = self.digest(root), _label(root)
        hashes, labels = [], []
        for k in range(len(tokens) // self.block_size):
            block = tokens[k * self.block_size : (k + 1) * self.block_size].tobytes()
            parent = self.digest(said("block", parent, block))
            label = _label(said("block", label, block))
            hashes.append(parent)
            labels.append(label)
        return Chain(tokens, self.block_size, self.shifted, tuple(hashes), tuple(labels))

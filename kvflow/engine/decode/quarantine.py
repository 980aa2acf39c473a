"""Quarantine: what failed parts of transfers may still write and read."""

from attrs import define, evolve, field, frozen

from kvflow.engine.decode.kv import DecodeKV
from kvflow.engine.decode.requests import Decoding
from kvflow.engine.messages import TransferEnded
from kvflow.engine.prefix.cache import Tables


@frozen(eq=False)
class _Kept:
    """Blocks that a request has left, and what their source is told when it is read no more."""

    work: Decoding
    tables: Tables
    ended: TransferEnded
    is_loan: bool

    @property
    def needs_source(self) -> bool:
        """Whether the source must stay although it is not read: a prefill engine whose reader goes
        computes no further, and the first token is still to come."""
        return not (self.is_loan or self.work.aborted or self.work.num_generated)


@define(eq=False)
class Quarantine:
    """The blocks of a decode engine that a failed part may still write, on any of its ranks."""

    kv: DecodeKV
    _kept: list[_Kept] = field(init=False, factory=list)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, work: Decoding, ended: TransferEnded, *, is_loan: bool) -> None:
        """The request goes on without its blocks."""
        self._kept.append(_Kept(work, self.kv.quarantine(work), ended, is_loan))

    def quiesced(self) -> list[TransferEnded]:
        """Nothing moves any more: the blocks are free. Returns what sources are told."""
        for kept in self._kept:
            self.kv.end_quarantine(kept.tables)
        over = [kept for kept in self._kept if not kept.needs_source]
        self._kept = [evolve(kept, tables={}) for kept in self._kept if kept.needs_source]
        return [kept.ended for kept in over]

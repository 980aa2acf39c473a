"""TierLender: units of the host tiers that a front keeps for decode engines to read."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from attrs import define, field

from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import AskUnits, Units, UnitsRead
from kvflow.engine.prefix.hashes import PrefixHasher
from kvflow.engine.tiers.manager import Tiers
from kvflow.errors import KvflowError


@define(eq=False)
class TierLender:
    """`tiers` are those of this front, all of whose chains `hasher` names."""

    hub: Hub
    hasher: PrefixHasher
    tiers: tuple[Tiers, ...]
    _lent: dict[str, Tiers] = field(init=False, factory=dict)
    _asking: "set[asyncio.Task[None]]" = field(init=False, factory=set)

    def ask(self, reader: str, ask: AskUnits) -> None:
        """A decode engine has blocks for a request, and wants what a tier has of its tokens."""
        asking = asyncio.get_running_loop().create_task(self._lend(reader, ask))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _lend(self, reader: str, ask: AskUnits) -> None:
        """Out of the tier that has most; the reader is answered in any case."""
        answer = Units(ask.request_id, "", None)
        try:
            chain, most = self.hasher.chain(ask.tokens, ask.salt), len(ask.tokens) - 1
            first = ask.start // chain.block_size
            tiers = max(self.tiers, key=lambda one: one.num_known(chain, first, most))
            lent = await tiers.lend(ask.request_id, chain, ask.start, most)
            if lent is not None:
                self._lent[ask.request_id] = tiers
                answer = Units(ask.request_id, tiers.attachment.name, *lent)
        finally:
            with suppress(KvflowError):  # the reader is gone, and with it the deployment
                self.hub.send(reader, answer)

    def read(self, message: UnitsRead) -> None:
        """The units need not be kept any more."""
        if (tiers := self._lent.pop(message.request_id, None)) is not None:
            tiers.end_loan(message.request_id)

    def forget(self, tokens: Sequence[int], salt: str | None) -> None:
        """No tier knows a block of the tokens any more: who has read them has failed."""
        chain = self.hasher.chain(tokens, salt)
        for tiers in self.tiers:
            tiers.forget(chain)

    async def close(self) -> None:
        """Nobody is answered any more."""
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

"""FrontOptions: how a deployment's front routes requests and hands them over."""

from collections.abc import Mapping

from attrs import field, frozen

from kvflow.router.config import RouterConfig


@frozen
class FrontOptions:
    """streaming: decode engines read a prompt's rows while it is computed. loans: engines take what
    decode engines hold of a prompt. local_prefill_tokens: see `RouterConfig`. prefill_kv_tokens and
    decode_kv_tokens: what the requests of an engine can hold together. block_size: of chains.
    push: prefill engines write what decode engines would read. hosts: where the engines run that
    are not on the front's `host`, by name."""

    block_size: int = 64
    streaming: bool = True
    loans: bool = True
    local_prefill_tokens: int = 0
    prefill_kv_tokens: int = 1 << 40
    decode_kv_tokens: int = 1 << 40
    push: bool = False
    hosts: Mapping[str, str] = field(factory=dict)
    host: str = ""

    def host_of(self, engine: str) -> str:
        return self.hosts.get(engine, self.host)

    def is_near(self, engine: str) -> bool:
        """Whether an engine can map the front's host tiers."""
        return self.host_of(engine) == self.host

    @property
    def router(self) -> RouterConfig:
        return RouterConfig(self.block_size, self.local_prefill_tokens, loans=self.loans)

"""How a step reaches the cached rows that other ranks hold: what may be chosen."""

from hashlib import sha256
from typing import Literal, get_args

from attrs import field, frozen

from kvflow.errors import LayoutError

AttentionWay = Literal["whole", "union", "queries"]
IndexWay = Literal["keys", "queries"]


@frozen
class AccessOptions:
    """Equal on all ranks of a group.

    attention: whether the latent context moves whole, the union of chosen rows moves, or queries
    move to the rows; "auto" lets the cost model decide step by step. index: whether index keys
    move to the queries or queries to the keys. workspace_tokens: rows of one workspace; what is
    longer is processed in parts. overlap: rows are fetched on a channel of their own, one part or
    layer ahead. Raises `LayoutError` for anything else."""

    attention: Literal["auto", "whole", "union", "queries"] = "auto"
    index: Literal["auto", "keys", "queries"] = "auto"
    workspace_tokens: int = field(default=1 << 18)
    overlap: bool = True

    def __attrs_post_init__(self) -> None:
        for name, known in (("attention", get_args(AttentionWay)), ("index", get_args(IndexWay))):
            if getattr(self, name) not in ("auto", *known):
                raise LayoutError(
                    f"AccessOptions.{name} is {getattr(self, name)!r}, must be one of "
                    f"{['auto', *known]}"
                )
        if self.workspace_tokens < 1:
            raise LayoutError(
                f"AccessOptions.workspace_tokens is {self.workspace_tokens}, must be at least 1"
            )

    @property
    def digest(self) -> bytes:
        """32 bytes that ranks compare before their first collective."""
        return sha256(repr(self).encode()).digest()

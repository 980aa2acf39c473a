"""PrefixConfig: whether and how a prefill engine reuses prefixes."""

from pathlib import Path

from attrs import field, frozen, validators
from attrs.converters import optional

from kvflow.errors import LayoutError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.values import integer, not_negative, positive


@frozen
class PrefixConfig:
    """`block_size` is the granularity of hits in tokens, by default the prefill block's. A host
    tier of `host_nbytes` bytes and a disk tier of `disk_nbytes` bytes under `disk_directory`
    exist if their sizes are above 0; files go through the host tier's memory. Raises
    `LayoutError` for a tier that lacks what it needs, a directory that is none, and a `block_size`
    of what is not reused."""

    enabled: bool = True
    block_size: int | None = field(
        default=None, converter=optional(integer), validator=validators.optional(positive)
    )
    host_nbytes: int = field(default=0, converter=integer, validator=not_negative)
    disk_directory: Path | None = field(default=None, converter=optional(Path))
    disk_nbytes: int = field(default=0, converter=integer, validator=not_negative)

    def __attrs_post_init__(self) -> None:
        if self.block_size and not self.enabled:
            raise LayoutError(
                f"block_size = {self.block_size} without prefix reuse, must be none: nothing is "
                f"reused"
            )
        if self.host_nbytes and not self.enabled:
            raise LayoutError("a host tier without prefix reuse: nothing would be read from it")
        if self.disk_nbytes and self.disk_directory is None:
            raise LayoutError(f"a disk tier of {self.disk_nbytes} bytes needs a directory")
        if self.disk_directory is not None and not (self.disk_nbytes and self.host_nbytes):
            raise LayoutError(
                f"a disk tier in {self.disk_directory} needs a size, is {self.disk_nbytes}, and a "
                f"host tier, is {self.host_nbytes} bytes"
            )
        directory = self.disk_directory
        if directory is not None and directory.exists() and not directory.is_dir():
            raise LayoutError(f"disk_directory = {str(directory)!r}, must be a directory")

    def unit_size(self, layout: KVLayout) -> int:
        """Tokens of a block of the chain, which is also a unit of the tiers."""
        return self.block_size or layout.groups[0].paging.block_size

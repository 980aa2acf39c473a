"""PlainFiles: memory to files and back by pread and pwrite."""

import os

from torch import Tensor

from kvflow.errors import TransferError


class PlainFiles:
    """Implements `FileMover` on machines without NIXL."""

    def write(self, fd: int, offset: int, data: Tensor) -> None:
        """See `FileMover.write`."""
        view, done = data.numpy().data, 0
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise TransferError(
                f"WRITE of {len(view)} bytes at {offset} failed: {error}"
            ) from error

    def read(self, fd: int, offset: int, data: Tensor) -> None:
        """See `FileMover.read`."""
        view, done = data.numpy().data, 0
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                raise TransferError(
                    f"READ of {len(view)} bytes at {offset} failed: {error}"
                ) from error
            if not count:
                raise TransferError(f"the file ends at byte {offset + done}, {len(view)} expected")
            done += count

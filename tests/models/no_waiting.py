"""A guard under which torch may not make the host wait for what a device computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "masked_select", "repeat_interleave",
    "bincount", "histc",
}  # fmt: skip
"""Operations that read device data on the host, or whose result's shape depends on it."""

READS = ("tolist", "numpy", "item", "cpu", "__array__", "__bool__", "__int__", "__index__")
"""Methods of a tensor that hand its data to the host, some of them past the dispatcher."""


class WaitError(AssertionError):
    """The host would have waited."""


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "repeat_interleave" and func._overloadname != "Tensor":
            name = "static"
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            name = "nonzero"
        to = (kwargs or {}).get("device")
        if name == "_to_copy" and to is not None and torch.device(to).type == "cpu":
            raise WaitError("copied to the cpu")
        if name in WAITS:
            raise WaitError(name)
        return func(*args, **(kwargs or {}))


def _refuse(name: str):
    def method(*args, **kwargs):
        raise WaitError(name)

    return method


@contextmanager
def no_waiting() -> Iterator[None]:
    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, _refuse(name)))
        stack.enter_context(NoWaiting())
        yield

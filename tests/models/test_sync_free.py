"""Nothing inside a decode-like step makes the host wait: not in the forward pass, the logits or
the MTP module, with more and with fewer positions than the top-k."""

import pytest
import torch
from flat_kv import FlatKV
from glm_fixture import TINY
from no_waiting import WaitError, no_waiting

from kvflow.comm import LocalComm
from kvflow.models import Glm, Segment

FORMATS = {"float32": torch.float32, "float64": torch.float64, "fp8": torch.float32}
LENGTHS = (3, 40, 130)


def segments(lengths, num_new: int) -> list[Segment]:
    return [
        Segment(i, torch.arange(length - num_new, length), length)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("lengths", [LENGTHS, (3,), (130,), (20, 9)])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_step_waits_for_nothing(kv_dtype: str, lengths, num_new: int) -> None:
    glm, comm = Glm.load(TINY, kv_dtype=kv_dtype, dtype=FORMATS[kv_dtype]), LocalComm()
    kv = FlatKV(glm.spec, len(lengths), max(lengths))
    generator = torch.Generator().manual_seed(1)
    if any(length > num_new for length in lengths):
        before = [
            Segment(i, torch.arange(n - num_new), n - num_new)
            for i, n in enumerate(lengths)
            if n > num_new
        ]
        kv.begin(before)
        tokens = torch.randint(0, 320, (sum(map(len, before)),), generator=generator)
        glm.forward(tokens, before, kv, comm)
    step = segments(lengths, num_new)
    tokens = torch.randint(0, 320, (num_new * len(lengths),), generator=generator)
    kv.begin(step)
    with no_waiting():
        hidden = glm.forward(tokens, step, kv, comm)
        following = glm.logits(hidden).argmax(-1)
    kv.begin(step)
    with no_waiting():
        drafted, selection = glm.mtp_forward(following, hidden, step, kv, comm)
        glm.mtp_forward(following, drafted, step, kv, comm, selection)
        glm.write_mtp(following, hidden, step, kv)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: (x > 1).nonzero(),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.numpy(),
        lambda x: int(x[0]),
        lambda x: x.repeat_interleave(x),
        lambda x: x.cpu(),
    ],
)
def test_the_guard_sees_each_way_to_wait(wait) -> None:
    x = torch.arange(4)
    wait(x)
    with pytest.raises(WaitError), no_waiting():
        wait(x)
    wait(x)

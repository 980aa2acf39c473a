"""vLLM's local lengths under DCP against `RoundRobin.local_len`."""

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from kvflow.layouts import RoundRobin

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 5, 7, 16, 64])
def test_local_lengths_are_equal_for_every_rank(interleave, count):
    rng = np.random.default_rng(interleave)
    for num_ranks in range(1, 17):
        lengths = np.arange(3 * num_ranks * interleave + 2)
        lengths = np.concatenate([lengths, rng.integers(0, 2**31 - 2**16, 50)])
        theirs = get_dcp_local_seq_lens(
            torch.from_numpy(lengths), num_ranks, None, interleave
        ).numpy()
        deal = RoundRobin(num_ranks, interleave)
        ours = [deal.local_len(int(n), range(num_ranks)) for n in lengths]
        assert np.array_equal(theirs, np.stack(ours)), (num_ranks, interleave)
        count("DCP local lengths: (W, I, length, rank)", theirs.size)


def test_a_length_beyond_int32_is_wrong_there_and_right_here(count):
    length = 2**31 + 5
    theirs = get_dcp_local_seq_lens(torch.tensor([length]), 2, None, 1)
    assert int(theirs.sum()) != length
    assert RoundRobin(2).local_len(length, [0, 1]).sum() == length
    count("DCP local lengths beyond int32: we differ")

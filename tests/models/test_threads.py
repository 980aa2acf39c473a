"""A row's bits do not depend on its step when torch divides a step between threads."""

import pytest
import torch
import torch.nn.functional as F

from kvflow.models.ops import Mlp, each_element


@pytest.fixture(params=[3, 4, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def silu_(x):
    return F.silu(x, inplace=True)


@pytest.mark.parametrize("function", [silu_, torch.sigmoid_])
def test_an_element_depends_on_nothing_beside_it(threads, function):
    x = torch.randn(1027, 96, generator=torch.Generator().manual_seed(threads))
    alone = torch.stack([function(row.clone()) for row in x])
    assert torch.equal(each_element(function, x.clone()), alone)


def test_a_row_of_an_mlp_depends_on_nothing_beside_it(threads):
    generator = torch.Generator().manual_seed(threads)
    gate, up, down = (torch.randn(*s, generator=generator) for s in [(96, 64), (96, 64), (64, 96)])
    mlp, x = Mlp.from_hf(gate, up, down), torch.randn(1027, 64, generator=generator)
    whole = mlp(x)
    assert torch.equal(whole, torch.cat([mlp(x[:512]), mlp(x[512:])]))
    assert torch.equal(whole[::97], torch.cat([mlp(row[None]) for row in x[::97]]))

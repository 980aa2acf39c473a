"""The law of transfers on drawn layouts, through every executor of this process."""

import pytest
import torch
from hypothesis import given

from kvflow.testing import Case, cases, check_law
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor

torch.set_num_threads(1)


@pytest.mark.parametrize("executor", [ReferenceExecutor(), StridedExecutor()], ids=repr)
@given(case=cases())
def test_executors_keep_the_law(executor, case: Case) -> None:
    check_law(executor, case.src, case.dst, case.tokens)

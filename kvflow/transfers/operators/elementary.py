"""exp and log of float64 from sums, products and quotients alone.

Each of those is correctly rounded wherever it runs, so a number has the same result in any lane of
any vector, on a CPU and on a GPU. torch's own exp is not so: its vector loop and its scalar tail
differ in the last bit, and a row's bytes would depend on how many rows stand beside it.
"""

from math import factorial, log, sqrt
from typing import Literal

import torch
from torch import Tensor

Base = Literal["e", "2"]
_LN2 = log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # so few bits that a product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP = [1.0 / factorial(k) for k in range(13, -1, -1)]
_LOG = [2.0 / (2 * k + 1) for k in range(11, -1, -1)]
_MOST = 1000.0
"""Powers below 2**-1000 are taken for 0: the largest weight of a merge is 1."""


def exponential(x: Tensor, base: Base) -> Tensor:
    """base**x for float64 x <= 0, within 2 ulp; 0 for -inf, NaN for NaN."""
    tiny = x < (-_MOST if base == "2" else -_MOST * _LN2)
    x = torch.where(tiny, 0.0, x)
    if base == "2":
        n = x.round()
        r = (x - n) * _LN2
    else:
        n = (x * (1.0 / _LN2)).round()
        r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    power = (n.to(torch.int64) + 1023 << 52).view(torch.float64)
    return torch.where(tiny, 0.0, _polynomial(_EXP, r) * power)


def logarithm(x: Tensor, base: Base) -> Tensor:
    """The logarithm of float64 x >= 1 to the base, within 2 ulp of max(1, result); NaN for NaN."""
    bits = x.view(torch.int64)
    n = ((bits >> 52) - 1023).to(torch.float64)
    f = (bits & (1 << 52) - 1 | 1023 << 52).view(torch.float64)
    above = f > sqrt(2.0)
    n, f = torch.where(above, n + 1.0, n), torch.where(above, f * 0.5, f)
    s = (f - 1.0) / (f + 1.0)
    rest = _polynomial(_LOG, s * s) * s
    if base == "2":
        result = n + rest * (1.0 / _LN2)
    else:
        result = n * _LN2_HIGH + (n * _LN2_LOW + rest)
    return torch.where(x.isnan(), x, result)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """By Horner's rule, the coefficient of the highest power first."""
    value = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = value * x + c
    return value

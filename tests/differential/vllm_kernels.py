"""vLLM's Triton kernels in the interpreter.

On a CPU vLLM replaces Triton by a placeholder, so its kernels stay plain functions. Their source,
as it stands in the wheel, is written to a file that imports the real Triton. The process must have
TRITON_INTERPRET=1.
"""

import importlib.util
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

_binary_op = InterpreterBuilder.binary_op


def _one_bit(self, lhs, rhs, op):
    """The interpreter of Triton 3.9 widens the `|` of a vector and a scalar of booleans to int8,
    and then refuses it as a mask."""
    result = _binary_op(self, lhs, rhs, op)
    if lhs.data.dtype == np.bool_ or rhs.data.dtype == np.bool_:
        result.data = result.data.astype(np.bool_)
    return result


def interpreted(directory: Path, *functions) -> ModuleType:
    """A module of these functions, interpreted by Triton."""
    parts = ["import triton", "import triton.language as tl"]
    for function in functions:
        source = textwrap.dedent(inspect.getsource(function))
        parts.append(re.sub(r"^@staticmethod\n", "", source))
    InterpreterBuilder.binary_op = _one_bit
    path = directory / "vllm_kernels_interpreted.py"
    path.write_text("\n".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

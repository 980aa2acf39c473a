"""The helpers of tests/transfers serve here too."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)

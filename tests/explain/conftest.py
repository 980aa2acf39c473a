"""Threads cost more than they give in tests of this size."""

import torch

torch.set_num_threads(1)

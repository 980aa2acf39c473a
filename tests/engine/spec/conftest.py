"""Fixtures of the speculative decoding tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

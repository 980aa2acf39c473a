"""Fixtures of the speculative decoding tests."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent.parent
sys.path[:0] = [str(TESTS / "engine"), str(TESTS / "models")]

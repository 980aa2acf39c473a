"""Where the reference data lies."""

from pathlib import Path

FIXTURES = Path(__file__).parent.parent / "fixtures"
TINY = FIXTURES / "tiny_glm_scaled"

"""The prefill engine: its scheduler in the front, and what each of its ranks does."""

from kvflow.engine.prefill.engine import PrefillEngine
from kvflow.engine.prefill.requests import Loan

__all__ = ["Loan", "PrefillEngine"]

"""The old name of `kvflow.engine.access`."""

from kvflow.engine.access import PagedMemory as PagedMemory
from kvflow.engine.access import PagedStep as PagedStep

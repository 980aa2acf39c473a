"""The errors kvflow raises: each message holds the value, the rule and both numbers."""


class KvflowError(Exception):
    """Base of every error that kvflow raises on purpose."""


class LayoutError(KvflowError, ValueError):
    """A layout value that breaks one of its laws, or a coordinate outside its domain."""


class PlanError(KvflowError, ValueError):
    """A transfer that cannot be derived, or a plan that fails verification."""


class ContentMismatch(PlanError):  # noqa: N818
    """Two layouts whose bytes do not mean the same thing."""


class TransferError(KvflowError, RuntimeError):
    """A transfer that failed while bytes were moving; the target holds nothing provable."""


class CapacityError(KvflowError, RuntimeError):
    """A pool, workspace or queue is too small for what was asked of it."""

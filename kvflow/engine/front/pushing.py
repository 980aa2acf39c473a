"""A push under way, as the front sees it: who asked, and what the writing ranks have answered."""

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from kvflow.engine.messages import Pushed, RowsPushed
from kvflow.engine.reports import joined_report


@define(eq=False)
class Pushing:
    """`missing`: ranks that have not answered."""

    reader: str
    missing: int
    _error: str | None = field(init=False, default=None)
    _reports: list[Mapping[str, Any]] = field(init=False, factory=list)

    def take(self, answer: RowsPushed) -> Pushed | None:
        """With the last answer, what the reader is told."""
        self.missing -= 1
        self._error = self._error or answer.error
        if answer.report is not None:
            self._reports.append(answer.report)
        if self.missing:
            return None
        report = joined_report(self._reports) if self._error is None else None
        return Pushed(answer.request_id, report, self._error)

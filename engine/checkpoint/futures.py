"""The future that represents a background save."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ..errors import SaveFailedError
from .background import BackgroundSave


class SaveFuture(Future[Any]):
    """A future for the report of a save. An error that is retrieved from this future is not raised again elsewhere."""

    def __init__(self, background: BackgroundSave) -> None:
        super().__init__()
        self._background = background
        self.set_running_or_notify_cancel()  # a save cannot be cancelled

    def end(self, report: object, error: SaveFailedError | None) -> None:
        """Set the save's report or error as the result; called on the save's thread."""
        if error is None:
            self.set_result(report)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._background.hurry()
        error = super().exception(timeout)
        self._background.take_error()
        return error

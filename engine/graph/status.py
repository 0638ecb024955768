"""What a restore returns: assertions about how program and checkpoint match, and the report behind them."""

from __future__ import annotations

from typing import Self

from ..errors import UnmatchedObjectsError
from .report import RestoreReport, lines
from .restoration import Restoration
from .tracked import Node
from .views import COUNTER


class RestoreStatus:
    """How a restore went, as far as one can tell at this moment; later calls may see more objects.

    What turns up late is restored at the latest by `try_complete` and the assertions, never by a save.

    Args:
        restoration: The restore, or None where no checkpoint was given.
        root: What was restored into; it is kept alive.
    """

    def __init__(self, restoration: Restoration | None, root: Node) -> None:
        self._restoration = restoration
        self._root = root

    @property
    def report(self) -> RestoreReport:
        """What is restored and what is not, as the program is now."""
        if self._restoration is None:
            return RestoreReport(
                checkpoint="",
                restored=(),
                missing=(),
                pending=(),
                unused=(),
                conflicts=(),
                skipped=(),
                nontrivial=False,
            )
        return self._restoration.report(self._root)

    def try_complete(self) -> Self:
        """Restores what has been built since, wherever it was attached.

        Objects that are attached to a `Node` or a tracked list or dictionary are restored at once; this is for those
        that turn up elsewhere, such as a layer that is assigned to a module. The assertions do the same. What is
        already restored stays as it is.

        Raises:
            TreeMismatchError: An object does not fit its value; nothing was changed.
        """
        if self._restoration is not None and not self._restoration.retired:
            self._restoration.advance()
        return self

    def assert_consumed(self) -> Self:
        """Makes sure that program and checkpoint match exactly.

        Raises:
            UnmatchedObjectsError: A value is in one of them only.
        """
        report = self._checked()
        if not report.complete:
            raise UnmatchedObjectsError(f"program and checkpoint do not match exactly: {report}", report)
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Makes sure that every value that is in the program now was restored.

        Raises:
            UnmatchedObjectsError: One was not.
        """
        report = self._checked()
        if report.missing or report.conflicts:
            raise UnmatchedObjectsError(f"not everything in the program was restored: {report}", report)
        return self

    def assert_nontrivial_match(self) -> Self:
        """Makes sure that anything at all was found in the checkpoint.

        Raises:
            UnmatchedObjectsError: Nothing but the root was.
        """
        report = self._checked()
        if not report.nontrivial:
            raise UnmatchedObjectsError(nothing_matched(report), report)
        return self

    def expect_partial(self) -> Self:
        """Says that it is as intended if values of the checkpoint stay unrestored.

        They are not warned about, and a save leaves them behind: it saves what the program has, and warns where objects
        are there by now that have not got their values. What is attached to a `Node` is restored nevertheless.
        """
        if self._restoration is not None:
            self._restoration.outcome.partial = True
        return self

    def _checked(self) -> RestoreReport:
        if self._restoration is None:
            raise UnmatchedObjectsError("no checkpoint was given: restore(None) restores nothing", self.report)
        if self._restoration.outcome.unrestored():
            self.try_complete()
        return self.report


def nothing_matched(report: RestoreReport) -> str:
    """Says that a restore found nothing, and what there was to find."""
    if not report.missing and not set(report.restored) - {COUNTER}:
        what = f"{report.checkpoint}: nothing was restored, as nothing has been attached yet"
    else:
        what = (
            f"{report.checkpoint}: nothing was restored. Names in the program and in the checkpoint differ from the "
            "first key on: Checkpoint(model) and Checkpoint(model=model) are two different things, for example"
        )
    return "\n".join([what, *lines("in the program", report.missing), *lines("in the checkpoint", report.pending)])

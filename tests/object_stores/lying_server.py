"""A fake S3 that lies: it answers with success, and has not done, or does not say, what it was asked."""

from __future__ import annotations

from collections.abc import Callable

from tests.object_stores.s3_server import S3Server
from tests.object_stores.store_server import Answer, Fault


class LyingServer(S3Server):
    """A region of S3 whose answers are wrong on demand: for requests that a pattern matches, so many times."""

    page_of_a_proxy = Answer(200, b"<html><body>Please log in</body></html>", {"Content-Type": "text/html"})

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[str] = set()

    def answers_with_a_page(self, pattern: str, times: int = 1) -> Fault:
        """Answers requests with the page of a proxy, and does nothing."""
        return self.fail(pattern, times=times, answer=self.page_of_a_proxy)

    def answers_with_an_error(self, pattern: str, times: int = 1) -> Fault:
        """Answers requests with an error that has the status of success, and does nothing."""
        return self.fail(pattern, times=times, answer=self.error(200, "InternalError"))

    def garbles(self, pattern: str, content: bytes, times: int = 1) -> Fault:
        """Answers reads with other content, as an object of the service."""
        return self.fail(pattern, times=times, answer=Answer(200, content, {"ETag": '"another"'}))

    def hides(self, name: str) -> Callable[[], None]:
        """Leaves a name out of lists until the function that is returned is called."""
        hidden = self.hidden
        hidden.add(name)
        return lambda: hidden.discard(name)

    def refuses_its_own(self, pattern: str, times: int = 1) -> Fault:
        """Does what it is asked, and answers that another writer was faster, as to a request that was repeated."""
        return self.fail(pattern, times=times, after_doing=self.error(409, "ConditionalRequestConflict"))

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Returns the keys of a bucket in order, without those that are hidden."""
        return [key for key in super().keys(bucket, prefix) if key not in self.hidden]

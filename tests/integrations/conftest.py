"""The process that the programs of these tests are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integrations.served import Server, started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("served") / "stderr") as found:
        yield found

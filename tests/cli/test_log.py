from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from holdfast.cli.log import configure_logging


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    logger = logging.getLogger("holdfast")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_lines_go_to_standard_output_and_warnings_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    logger = logging.getLogger("holdfast.recipes")
    logger.debug("nothing")
    logger.info("step %d", 3)
    logger.warning("damaged")

    out, err = capsys.readouterr()
    assert [line.split(" ", 1)[1] for line in out.splitlines()] == ["step 3"]
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == ["warning: damaged"]


def test_configuring_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    configure_logging("debug")
    logging.getLogger("holdfast").debug("once")

    assert capsys.readouterr().out.count("once") == 1

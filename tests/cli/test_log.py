from __future__ import annotations

import logging

import pytest

from holdfast.cli.streams import configure_logging


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

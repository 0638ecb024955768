"""What a checkpoint, a program or an address brings never reaches a terminal as it is; where lines go."""

from __future__ import annotations

import logging
import traceback
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cli.main import main
from holdfast.cli.streams import configure_logging, one_line, visible
from holdfast.engine.storage import explain_failure

ACTING = "a\x1b[2J\x1b]0;title\x07\r\u202e\u2066\x9b31m\u2028b"
FORGED = f"{ACTING}\nforged line"


def check(text: str) -> None:
    bad = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Cs")} - {"\n", "\t"}
    assert not bad, text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, value in (("run", 1.0), ("other", 2.0)):
        with hf.CheckpointManager(tmp_path / name) as manager:
            for step in (1, 2):
                tree = {FORGED: np.full(3, value), "text": FORGED, "list": [FORGED]}
                manager.save(step, tree, metrics={FORGED: value}, reason=FORGED)
    return tmp_path / "run"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ["ls", "RUN"],
        ["show", "RUN"],
        ["show", "RUN", "--tree"],
        ["show", "RUN", "--stats"],
        ["diff", "RUN/1", "OTHER/1"],
        ["diff", "RUN", "OTHER"],
        ["verify", "RUN"],
        ["prune", "RUN", "--keep-latest", "1", "--dry-run"],
        ["show", f"RUN/{FORGED}"],
        ["cp", f"RUN/{FORGED}", "RUN"],
        ["show", "RUN", "--select", FORGED],
        [FORGED],
    ],
    ids=lambda words: ascii(" ".join(words))[:20],
)
def test_nothing_acts_on_the_terminal(
    run: Path, words: list[str], terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    status = main([word.replace("RUN", str(run)).replace("OTHER", str(run.with_name("other"))) for word in words])
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert lines
    for line in lines:
        check(line)
        assert status or not line.strip().startswith("forged")


def test_the_log_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines go to standard output, and warnings to standard error; configuring twice does not double them."""
    for level in ("debug", "info"):
        configure_logging(level)
    logger = logging.getLogger("holdfast.recipes")
    logger.debug("nothing")
    logger.info("step %d from s3://key:secret@bucket/x", 3)
    logger.warning("%s: restored", ACTING)
    out, err = capsys.readouterr()
    assert [line.split(" ", 1)[1] for line in out.splitlines()] == ["step 3 from s3://***@bucket/x"]
    check(err)
    assert err.split(" ", 1)[1].startswith("warning: a\\x1b[2J")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "address",
    [
        "s3://key:secret@bucket/x",
        "https://key:secret@host/x",
        "https:/key:secret@host/x",
        "s3://bucket/x?X-Amz-Signature=secret&b=secret",
        "http://host/x?token=secret",
        "gs://secret@bucket",
        "s3://key:sec ret/secret@bucket/x",
        "s3://key:it's secret@bucket/x",
        's3://key:"secret"@bucket/x',
        "s3://key:sec@ret/secret@bucket/x",
        "s3://key:1234/secret@bucket/x",
        "s3://key:50%/secret#secret?secret@bucket/x",
        "s3://key%3Asecret%40secret%2Fsecret@bucket/x",
        "gs://sec ret secret@bucket/x",
        "s3:/key:of secret@bucket/x",
        "sftp://key:secret@host/x",
        "sftp://key:se cret/secret@host/x",
        "sftp://key:9secret/secret@host/x",
        "az://key:secret/secret@box/x",
        "https://account.blob.core.windows.net/box?sig=of%20secret&sp=r secret",
        "simplecache::s3://key:a secret@bucket/x",
        "wasb://key:a secret@host/x",
        "file://key:a secret@host/x",
        "s3://key:a\0 secret@bucket",
    ],
)
def test_passwords_in_addresses_are_not_repeated(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(hf.errors.InvalidLocationError) as caught:
        hf.load(address)
    assert "secret" not in str(caught.value)
    assert "***" in str(caught.value)
    with pytest.raises((hf.errors.OptionError, hf.errors.InvalidLocationError)) as refused:
        hf.CheckpointCallback("/nowhere/else", init_from=address)
    assert "secret" not in "".join(traceback.format_exception(refused.value))
    for words in (["ls", address], ["cp", address, "/nowhere/else"], ["ls", "--json", address]):
        assert main(words) == 2
        said = capsys.readouterr()
        assert "secret" not in said.out + said.err


@pytest.mark.parametrize(
    "address",
    [
        "https://key:secret@proxy:3128/?token=secret",
        "https://key:a secret/secret@proxy:3128",
        "https://key:it's@secret secret@proxy:3128/x",
    ],
)
def test_passwords_of_endpoints_are_not_repeated(address: str) -> None:
    kind = hf.errors.StorageUnavailableError
    said = str(explain_failure(kind, "read", "s3://bucket/x", f"cannot reach {address}: refused"))
    assert "secret" not in said
    assert "proxy:3128" in said
    assert said.endswith("refused; check the connection and try again")


@pytest.mark.parametrize(
    "text",
    [
        "Größe 3 µs → 5\n\tlayer/kernel?x=1 a@b 50%",
        "http://localhost:9000/a@b",
        "cannot list s3://bucket: denied for me@corp, ask http://localhost:9000, or mail a@b",
        "from http://[::1]:9000/x to s3://bucket/a:b@c",
        "file:///a:b c@d",
    ],
)
def test_what_is_plain_and_no_password_stays(text: str) -> None:
    assert visible(text) == text
    assert one_line("a\nb") == "a\\nb"
    assert visible("\ud800") == "\\ud800"

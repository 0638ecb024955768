"""Answers of success that are lies cost no checkpoint: what was not stored is sent again, or told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store, s3_store
from tests.object_stores.lying_server import LyingServer

import holdfast as hf

ALWAYS = 1000
TREE: dict[str, Any] = {"w": np.arange(100_000, dtype=np.float32), "step": 3}  # a folder
SMALL: dict[str, Any] = {"w": np.arange(1000, dtype=np.float32), "step": 3}  # a zip file


@pytest.fixture(scope="module")
def server() -> Iterator[LyingServer]:
    with LyingServer() as server:
        with pytest.MonkeyPatch.context() as patch:
            hf.save(f"{s3_store(server, patch).url}/first", {})  # the first save asks whether conditions are honoured
        yield server


@pytest.fixture
def liar(server: LyingServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield s3_store(server, monkeypatch)
    server.hidden.clear()
    server.reset()


def is_whole(url: str, tree: dict[str, Any]) -> bool:
    found = hf.load(url)
    return np.array_equal(found["w"], tree["w"]) and found["step"] == tree["step"] and hf.verify(url).ok


@pytest.mark.parametrize("tree", [TREE, SMALL], ids=["folder", "zip file"])
@pytest.mark.parametrize("way", ["answers_with_a_page", "answers_with_an_error"])
@pytest.mark.parametrize("pattern", [r"PUT .*(\.0\.\d+|\.zip)$", r"PUT .*(tree\.json|\.zip)$"], ids=["data", "tree"])
def test_what_was_not_stored_is_sent_again(
    server: LyingServer, liar: Store, way: str, pattern: str, tree: dict[str, Any]
) -> None:
    fault = getattr(server, way)(pattern)
    hf.save(f"{liar.url}/ckpt", tree)
    assert fault.times == 0
    assert is_whole(f"{liar.url}/ckpt", tree)


@pytest.mark.parametrize("tree", [TREE, SMALL], ids=["folder", "zip file"])
@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
@pytest.mark.parametrize("way", ["answers_with_a_page", "answers_with_an_error"])
def test_a_record_that_is_never_stored(
    server: LyingServer, liar: Store, way: str, old: bool, tree: dict[str, Any]
) -> None:
    url = f"{liar.url}/ckpt"
    if old:
        hf.save(url, SMALL)
    getattr(server, way)(r"PUT .*checkpoint\.json", ALWAYS)
    with pytest.raises(hf.errors.StorageUnavailableError):
        hf.save(url, tree, overwrite=old)
    server.reset()
    if old:
        assert is_whole(url, SMALL)
    else:
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(url)
    hf.save(url, tree, overwrite=old)
    assert is_whole(url, tree)


@pytest.mark.parametrize("tree", [TREE, SMALL], ids=["folder", "zip file"])
def test_a_record_that_is_called_a_conflict_with_itself(server: LyingServer, liar: Store, tree: dict[str, Any]) -> None:
    """A request that was repeated meets its own object, time and again."""
    fault = server.refuses_its_own(r"PUT .*checkpoint\.json", 3)
    hf.save(f"{liar.url}/ckpt", tree)
    assert fault.times == 0
    assert is_whole(f"{liar.url}/ckpt", tree)


def test_a_key_that_no_list_can_have_is_named(liar: Store) -> None:
    hf.save(f"{liar.url}/run/1", SMALL)
    liar.server.put(liar.bucket, "run//x", b"")
    with pytest.raises(hf.errors.InvalidLocationError, match=r"cannot list .*run//x.*empty path segment"):
        hf.list_checkpoints(f"{liar.url}/run")

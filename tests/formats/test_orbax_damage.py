"""Orbax checkpoints that are damaged, or made to do harm."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.orbax_files import LAYOUTS, edit, save

import holdfast as hf
from holdfast.engine import errors
from holdfast.engine.storage import as_location
from holdfast.integrations.formats.orbax.arrays import reason

jnp: Any = pytest.importorskip("jax.numpy")
Saved = Callable[[str], Path]
since_0_11_32 = pytest.mark.needs("orbax-checkpoint", "0.11.32")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("originals")
    tree = {"w": np.random.default_rng(0).random((64, 8)), "v": jnp.arange(300.0), "text": "hello", "step": 3}
    for name, layout in LAYOUTS.items():
        save(root / name.replace(" ", "_"), tree, **layout)
    return root


@pytest.fixture
def saved(originals: Path, tmp_path: Path) -> Saved:
    return lambda layout: Path(shutil.copytree(originals / layout.replace(" ", "_"), tmp_path / "checkpoint"))


def data_files(path: Path, layout: str) -> list[Path]:
    """The files that hold the array w."""
    if layout.startswith("ocdbt"):
        return [max((path / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)]
    return [file for file in (path / "w").rglob("*") if file.is_file() and "zarr" not in file.name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damaged_data_is_named(saved: Saved, layout: str, damage: str) -> None:
    path = saved(layout)
    (file,) = data_files(path, layout)
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 3] if damage == "truncated" else b"")
    with pytest.raises(hf.DamagedCheckpointError) as raised:
        hf.load(path)
    assert "\n  w: " in str(raised.value)
    assert file.name in str(raised.value)
    (checkpoint,) = hf.verify(path).checkpoints
    assert "w" in {problem.leaf for problem in checkpoint.problems}
    assert hf.load(path, select="text") == {"text": "hello"}


def entry(*keys: str, kind: str = "np.ndarray") -> dict[str, Any]:
    return {
        str(keys): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_descriptions_of_arrays_are_named(saved: Saved, layout: str) -> None:
    path = saved(layout)
    lost = "lost" if layout.startswith("ocdbt") else "w"
    edit(path, lambda document: document["tree_metadata"].update(entry(lost)))
    for file in (path / "w").glob("*zarr*"):
        file.unlink()
    with pytest.raises(hf.DamagedCheckpointError, match=rf"\n  {lost}: .*{lost}/"):
        hf.load(path)
    assert not hf.verify(path).ok


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("_METADATA", b"", "_METADATA is damaged: it is not JSON"),
        ("_METADATA", b"[]", "expected a JSON object, found list"),
        ("_METADATA", b"{}", "expected the member tree_metadata"),
        ("_METADATA", b"[" * 100_000, "_METADATA is damaged: it is nested too deeply"),
        ("_METADATA", b'{"tree_metadata": {"x": {"key_metadata": 3}}}', "the keys of entry x are not a path"),
        ("_METADATA", b'{"tree_metadata": {"__import__(1)": {}}}', "are not a path"),
        ("_strings.json", b"{}", "no text for leaf text"),
        ("_strings.json", b"\xff", r"_strings\.json is damaged: it is not JSON"),
        ("array_metadatas/process_0", b"{", "process_0 is damaged"),
        ("manifest.ocdbt", 0, r"manifest\.ocdbt"),
        ("manifest.ocdbt", 10, r"manifest\.ocdbt"),
        ("manifest.ocdbt", 60, r"manifest\.ocdbt"),
        ("_METADATA", None, "_METADATA is missing"),
        # Before, no document says that there was a database.
        pytest.param("manifest.ocdbt", None, "manifest.ocdbt is missing", marks=since_0_11_32),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("layout", ["ocdbt zarr2", "ocdbt zarr3"])
def test_damaged_and_missing_documents(
    saved: Saved, layout: str, file: str, content: bytes | int | None, what: str
) -> None:
    """Numbers say how many bytes of a file are left."""
    path = saved(layout)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes((path / file).read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(hf.DamagedCheckpointError, match=what):
        hf.load(path)
    assert not hf.verify(path).ok
    if content is None:
        (path / "_CHECKPOINT_METADATA").unlink()
        with pytest.raises(hf.DamagedCheckpointError, match=what):
            hf.load(path)


def add(*entries: dict[str, Any]) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda document: [document["tree_metadata"].update(one) for one in entries])


def claim(**claims: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        edit(path, lambda document: document.update(claims), "w/.zarray")
        edit(path, lambda document: document.pop("store_array_data_equal_to_fill_value"))

    return change


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "twice": (add(entry("w"), {"again": entry("w")["('w',)"]}), "occurs twice"),
    "through a leaf": (add(entry("w", "inner")), "leads through a leaf"),
    "deep": (add(entry(*map(str, range(300)))), "nested deeper"),
    "dots": (add(entry("..", "..", "outside")), r"\.\.\.outside"),
    "outside": (add(entry("../outside")), "not a valid folder name"),
    "nothing between slashes": (add(entry("a//b")), "not a valid folder name"),
    "NUL": (add(entry("nul\0")), "not a valid folder name"),
    "an array too large to be true": (
        claim(shape=[1 << 40, 8]),
        r"its arrays claim 7036874417\d* bytes, but its files",
    ),
    "chunks far larger than their array": (claim(chunks=[1 << 34, 8]), r"chunks of array 'w' claim 109951162\d* bytes"),
}


@pytest.mark.parametrize(("change", "what"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_trees(saved: Saved, change: Callable[[Path], None], what: str) -> None:
    path = saved("directories zarr2")
    change(path)
    with pytest.raises(hf.DamagedCheckpointError, match=what):
        hf.load(path)
    assert not hf.verify(path).ok


def test_values_of_unknown_types_are_read_if_they_are_arrays(saved: Saved) -> None:
    path = saved("ocdbt zarr3")
    edit(path, lambda document: document["tree_metadata"].update(entry("w", kind="another.Library")))
    assert hf.load(path)["w"].shape == (64, 8)


@pytest.mark.parametrize("layout", ["ocdbt zarr3", "directories zarr2"])
@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_harmless_or_an_error_of_ours(saved: Saved, layout: str, seed: int) -> None:
    path = saved(layout)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    whole = {file: file.read_bytes() for file in files}
    numbers = np.random.default_rng(seed)
    for _ in range(12):
        file = files[numbers.integers(len(files))]
        content = bytearray(whole[file])
        for place in numbers.integers(0, len(content), 3) if content else ():
            content[place] = numbers.integers(256)
        file.write_bytes(content[: numbers.integers(len(content) + 1)] if numbers.random() < 0.3 else content)
        for look in (hf.load, hf.describe, hf.verify, hf.list_checkpoints):
            with contextlib.suppress(hf.HoldfastError):
                look(path)
        file.write_bytes(whole[file])
    assert hf.verify(path).ok


def test_links_that_lead_in_circles(saved: Saved) -> None:
    path = saved("ocdbt zarr2")
    for name in ("one", "two", "three"):
        (path / name).symlink_to(path, target_is_directory=True)
    assert hf.load(path, select="v")["v"].tolist() == list(range(300))


STATUSES: dict[str, type[Exception]] = {
    "UNAVAILABLE: no answer": errors.StorageUnavailableError,
    "DEADLINE_EXCEEDED: too late": errors.StorageUnavailableError,
    "CANCELLED: given up": errors.StorageUnavailableError,
    "PERMISSION_DENIED: no": errors.StoragePermissionError,
    "UNAUTHENTICATED: who?": errors.StoragePermissionError,
    "RESOURCE_EXHAUSTED: quota": errors.StorageFullError,
    "ABORTED: changed meanwhile": errors.StorageConflictError,
    "ABORTED: All 8 retry attempts failed: SlowDown: [http_response_code='503']": errors.StorageUnavailableError,
    "ABORTED: All 8 retry attempts failed: RequestTimeTooSkewed": errors.StoragePermissionError,
    "ExpiredToken: The token has expired [http_response_code='400']": errors.StoragePermissionError,
    "INTERNAL: Failed to get credentials from provider: none": errors.StoragePermissionError,
    "INVALID_ARGUMENT: Malformed List response": errors.StorageUnavailableError,
}


def test_errors_of_the_storage_are_not_those_of_an_array() -> None:
    place = as_location("memory://x")
    for message, expected in STATUSES.items():
        with pytest.raises(expected, match=r"^cannot read memory://x: ") as caught:
            reason(ValueError(f"{message} [x-amzn-requestid='1']"), place)
        assert type(caught.value) is expected
        assert "requestid" not in str(caught.value)
    for status in ("NOT_FOUND: ", "DATA_LOSS: ", "OUT_OF_RANGE: ", "INTERNAL: ", "BRAND_NEW: ", ""):
        assert reason(ValueError(f"{status}Invalid: key [tensorstore_spec='x']"), place) == "Invalid: key"

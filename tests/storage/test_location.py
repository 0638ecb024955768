"""Locations as values: parsing, joining, comparing."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.engine.errors import InvalidLocationError, OptionError
from holdfast.engine.storage import Location, as_location


@pytest.mark.parametrize(
    ("text", "url", "name", "parent"),
    [
        ("/runs/x", "/runs/x", "x", "/runs"),
        ("/runs//x/", "/runs/x", "x", "/runs"),
        ("/runs/y/../x", "/runs/x", "x", "/runs"),
        ("/", "/", "", "/"),
        ("/a%20b/c d", "/a%20b/c d", "c d", "/a%20b"),
        ("/odd://name", "/odd:/name", "name", "/odd:"),
        ("file:///runs/x", "/runs/x", "x", "/runs"),
        ("file:///a%20b/c%25d", "/a b/c%d", "c%d", "/a b"),
        ("FILE:///runs", "/runs", "runs", "/"),
        ("memory://x", "memory://x", "x", "memory://"),
        ("memory://", "memory://", "", "memory://"),
        ("memory://x//y/", "memory://x/y", "y", "memory://x"),
        ("memory://a b/%C3%A9", "memory://a%20b/%C3%A9", "é", "memory://a%20b"),
        ("memory://a%2520b", "memory://a%2520b", "a%20b", "memory://"),
        ("s3://bucket/runs/x", "s3://bucket/runs/x", "x", "s3://bucket/runs"),
        ("s3://bucket/", "s3://bucket", "", "s3://bucket"),
        ("s3://bucket", "s3://bucket", "", "s3://bucket"),
        ("gs://bucket/x", "gs://bucket/x", "x", "gs://bucket"),
        ("gcs://bucket/a%20b", "gs://bucket/a%20b", "a b", "gs://bucket"),
        ("s3a://bucket/x", "s3://bucket/x", "x", "s3://bucket"),
        ("GCS://bucket", "gs://bucket", "", "gs://bucket"),
    ],
)
def test_parsing(text: str, url: str, name: str, parent: str) -> None:
    place = as_location(text)
    assert (place.url, place.name, place.parent.url) == (url, name, parent)
    assert str(place) == url
    assert repr(place) == f"Location({url!r})"
    assert as_location(place.url) == place
    assert as_location(place) is place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a path"),
        ("a\0b", "not a location"),
        ("memory://a%00b", "NUL"),
        ("http://host/x", "unknown scheme, 'http'"),
        ("file://host/x", "absolute path"),
        ("file://relative", "absolute path"),
        ("s3://", "names no bucket"),
        ("gs:///x", "names no bucket"),
        ("s3:/bucket/x", "lost a slash"),
        ("memory:/x", "lost a slash"),
        ("s3:bucket/x", "lost a slash.*: 's3://bucket/x'"),
        ("file:x", "'file:///x'"),
        ("gs//x", "lacks a colon: 'gs://x'"),
        ("gs/x", "looks like the URL 'gs://x'; as a folder, write './gs/x'"),
        ("D:x", "a Windows path; in WSL it is '/mnt/d/x'"),
        (r"D:\x\y", "in WSL it is '/mnt/d/x/y'"),
        ("memory://a/../b", "'..'"),
        ("memory://a/%2E%2E/b", "'..'"),
        ("s3://bucket/x?versionId=1", "%3F"),
        ("s3://bucket/x#y", "%23"),
        ("memory://x|ocdbt:", "%7C"),
    ],
)
def test_what_is_not_a_location(text: str, message: str) -> None:
    with pytest.raises(InvalidLocationError, match=message) as caught:
        as_location(text)
    assert isinstance(caught.value, ValueError)


def test_relative_paths_count_from_here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder has the name of a scheme."""
    monkeypatch.chdir(tmp_path)
    place = as_location("runs/x")
    assert place == as_location(tmp_path / "runs" / "x")
    assert as_location("./gs/x").url == str(tmp_path / "gs" / "x")
    (tmp_path / "gs").mkdir()
    assert as_location("gs/x").url == str(tmp_path / "gs" / "x")
    monkeypatch.chdir("/")
    assert place.url == str(tmp_path / "runs" / "x")


def test_a_tilde_is_the_home_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for text in ("~/x", pathlib.Path("~/x")):
        assert as_location(text).path == tmp_path / "home" / "x"
    assert as_location("./~/x").path == tmp_path / "~" / "x"
    assert as_location("x/~").path == tmp_path / "x" / "~"
    assert as_location("~no-user-of-this-name/x").path == tmp_path / "~no-user-of-this-name" / "x"
    assert as_location("file:///~/x").path == pathlib.Path("/~/x")
    assert as_location("memory://~/x").url == "memory://~/x"


@pytest.mark.parametrize("root", ["/", "/runs", "memory://", "memory://runs", "s3://bucket", "s3://bucket/runs"])
def test_joining(root: str) -> None:
    place = as_location(root)
    assert (place / "a b" / "c").url == (place / "a b/c").url
    assert (place / "a").parent == place
    assert (place / "a").name == "a"
    assert (place / "a%20b").name == "a%20b"
    assert as_location((place / "a%20b|?").url) == place / "a%20b|?"


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/", "a//b", "a/../b", "../a", "a/.", "a\0b"])
@pytest.mark.parametrize("root", ["/runs", "memory://runs"])
def test_joining_stays_inside(root: str, name: str) -> None:
    with pytest.raises(InvalidLocationError, match="runs"):
        as_location(root) / name


def test_equality_and_hash() -> None:
    assert len({as_location("/a"), as_location("file:///a"), as_location("/a/")}) == 1
    assert len({as_location("memory://a"), as_location("memory://") / "a"}) == 1
    different = ["/a", "memory://a", "s3://bucket/a", "s3://other/a", "gs://bucket/a", "/b"]
    assert len({as_location(text) for text in different}) == len(different)
    assert as_location("/a") != "/a"


@pytest.mark.parametrize("text", ["/runs/a b", "memory://runs/a%20b", "s3://bucket/x"])
def test_locations_are_immutable_values(text: str) -> None:
    place = as_location(text)
    assert pickle.loads(pickle.dumps(place)) == place
    assert copy.deepcopy(place) == place
    with pytest.raises(AttributeError, match="immutable"):
        place.name = "b"  # type: ignore[misc]  # That is what the test is about.


def test_local_locations_are_paths(tmp_path: pathlib.Path) -> None:
    place: Location = as_location(tmp_path) / "file"
    place.write_bytes(b"content")
    assert place.is_local
    assert place.path == tmp_path / "file"
    assert os.fspath(place) == str(tmp_path / "file")
    with open(place, "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("text", ["memory://x", "s3://bucket/x"])
def test_other_locations_are_not(text: str) -> None:
    place = as_location(text)
    assert not place.is_local
    for attempt in (lambda: os.fspath(place), lambda: place.path):
        with pytest.raises(TypeError, match=f"{text} is not a path"):
            attempt()


@pytest.mark.parametrize("place", [None, {"a": 1}, 3], ids=["none", "tree", "number"])
def test_other_objects_are_not_a_place(place: object) -> None:
    with pytest.raises(InvalidLocationError, match=r"of type \w+ is not a location.* path comes first"):
        as_location(place)  # type: ignore[arg-type]  # That is what the test is about.
    with pytest.raises(InvalidLocationError):
        as_location(os.fsencode("/x"))  # type: ignore[arg-type]  # That is what the test is about.


# ---- as handlers that were written for pathlib use them


def names(folder: Any, places: Iterable[Any]) -> list[str]:
    return sorted(str(place)[len(str(folder)) + 1 :] for place in places)


def work(folder: Any) -> list[Any]:
    """Writes and reads as such handlers do; returns all that it has seen."""
    folder.mkdir(parents=True, exist_ok=True)
    deep = folder.joinpath("deep", "er")
    deep.mkdir(parents=True)
    with (folder / "data.bin").open("wb") as file:
        file.write(b"12")
        file.write(b"3")
    with (folder / "data.bin").open("ab") as file:
        file.write(b"4")
    with deep.joinpath("table.csv").open("w", newline="") as file:
        file.writelines(["a,b\r\n", "ü,2\r\n"])
    seen: list[Any] = [(folder / "note.txt").write_text("été\n", encoding="utf-8")]
    with (folder / "note.txt").open(encoding="utf-8") as file:
        seen += list(file)
    with (folder / "data.bin").open("rb") as file:
        seen += [file.read(1), file.seek(-1, os.SEEK_END), file.read()]
    with pytest.raises(FileExistsError):
        (folder / "data.bin").open("xb")
    for missing in ("r", "rb"):
        with pytest.raises(FileNotFoundError):
            (folder / "missing").open(missing)
    (folder / "new").open("xb").close()
    seen.append(names(folder, folder.iterdir()))
    seen += [names(folder, folder.glob(one)) for one in ("*.*", "**/*.csv", "d*", "*/er/*", "**/er", "nothing*")]
    seen += [
        [place.is_file(), place.is_dir(), place.exists()] for place in (folder / "data.bin", deep, folder / "none")
    ]
    with (deep / "table.csv").open(encoding="utf-8", newline="") as file:
        seen.append(file.read())
    return [*seen, (folder / "note.txt").read_text(encoding="utf-8"), (folder / "data.bin").read_bytes()]


def test_handlers_find_the_methods_of_pathlib(place: str, tmp_path: pathlib.Path) -> None:
    expected = work(tmp_path / "pathlib")
    assert expected[-2:] == ["été\n", b"1234"]
    assert work(as_location(tmp_path / "disk")) == expected
    assert work(as_location(place)) == expected


def test_what_pathlib_refuses(tmp_path: pathlib.Path, place: str) -> None:
    as_location(tmp_path).mkdir(exist_ok=True)
    with pytest.raises(FileExistsError):
        as_location(tmp_path).mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert list(as_location(tmp_path).glob("**/link")) == [as_location(tmp_path / "link")]
    with pytest.raises(OptionError, match=r"mode='r\+b' opens no object in a store"):
        (as_location(place) / "x").open("r+b")

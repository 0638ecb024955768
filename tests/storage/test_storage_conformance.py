"""The conformance suite of storage backends, run for each of them."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.engine.errors import DamagedCheckpointError, InvalidLocationError, ObjectNotFoundError, StorageError
from holdfast.engine.storage import Buffer, DataFile, Location, Segment, as_location, folder_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MIB = 1 << 20
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]  # one file serves all examples
NAMES = [
    "plain",
    "two words",
    "100%",
    "%20",
    "é ü 漢字",
    "a.b-c_d~e",
    "q?m#p|e",
    "quote'\"",
    "🙂",
    "-rf",
    "back\\slash",
]


def noise(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def segment(offset: int, data: NDArray[np.uint8], part: int = MIB) -> Segment:
    return Segment(offset, data.size, lambda: (data[start : start + part] for start in range(0, data.size, part)))


def whole(data: NDArray[np.uint8]) -> list[Segment]:
    return [segment(0, data)]


class BackendConformance:
    """Subclasses give a ``root``: a location that does not exist yet and is removed afterwards."""

    @pytest.fixture
    def folder(self, root: Location) -> Location:
        root.make_directory()
        return root

    def test_a_missing_place_is_empty(self, root: Location) -> None:
        assert not root.exists()
        assert not root.is_directory()
        assert root.entries() == []
        root.remove()
        root.remove_tree()

    def test_a_shared_file_is_whole_without_the_other(self, folder: Location) -> None:
        one, other = folder / "one", folder / "other"
        data = noise(3 * MIB)
        one.write_data(data.size, whole(data))
        if not folder.can_share():
            pytest.skip("this store makes no copies itself")
        assert one.share(other, one.identity()) == other.identity()
        known = one.identity()
        one.remove()
        assert other.read_bytes() == data.tobytes()
        with pytest.raises(OSError, match=r"No such file|did not copy"):
            one.share(folder / "third", known)
        assert not (folder / "third").exists()

    @pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "plain"])
    @pytest.mark.parametrize("size", [0, 1, 10_000], ids=str)
    def test_bytes_come_back(self, folder: Location, size: int, atomic: bool) -> None:
        place, data = folder / "object", noise(size).tobytes()
        for content in (data, bytes(20_000), data):  # the last two replace one
            place.write_bytes(content, atomic=atomic)
            assert place.read_bytes() == content
        assert place.exists()
        assert not place.is_directory()
        assert [entry.name for entry in folder.entries()] == ["object"]
        assert [place.has_size(one) for one in (size, size + 1)] == [True, False]
        assert place.read_bytes(size) == place.read_bytes(size=size) == place.read_bytes(size, size=size) == data
        assert place.read_bytes(size=size + 7) == data, "it is shorter than was thought"
        if size:
            assert [place.has_size(one) for one in (size - 1, 0)] == [False, False]
            for known in (None, size):
                with pytest.raises(
                    DamagedCheckpointError, match=rf"object .*{size - 1}" if known is None else "object"
                ):
                    place.read_bytes(size - 1, size=known)

    def test_a_missing_object_has_a_clear_error(self, folder: Location) -> None:
        absent = folder / "no such"
        for read in (
            absent.read_bytes,
            lambda: absent.read_bytes(9),
            lambda: absent.read_bytes(size=9),
            lambda: absent.has_size(9),
            absent.open_data,
            lambda: absent.open_data(size=9000).read(100, 8000),
        ):
            with pytest.raises(ObjectNotFoundError, match=r"no(%20| )such") as caught:
                read()
            assert isinstance(caught.value, FileNotFoundError)
        (folder / "file").write_bytes(b"1")
        assert issubclass(ObjectNotFoundError, StorageError)
        with pytest.raises(ObjectNotFoundError):
            (folder / "file" / "below").read_bytes()
        assert (folder / "file" / "below").exists() is False

    def test_writes_and_deletions_with_a_condition(self, folder: Location) -> None:
        if not (folder / "asked").honours_conditions(b"?"):
            pytest.skip("nothing is conditional here")
        place = folder / "object"
        assert place.write_bytes_if(b"first", None)
        assert [place.write_bytes_if(data, None) for data in (b"first", b"second")] == [True, False]
        assert not place.write_bytes_if(b"second", b"another")
        assert [place.write_bytes_if(b"second", b"first") for _ in range(2)] == [True, True], "it has it already"
        place.remove_if(b"first")
        assert place.read_bytes() == b"second"
        place.remove_if(b"second")
        assert not place.exists()

    def test_data_of_a_known_size(self, folder: Location) -> None:
        data = noise(9000)
        (folder / "data").write_data(9000, whole(data))
        with (folder / "data").open_data(size=9000) as reader:
            assert np.array_equal(reader.read(100, 8000), data[100:8100])
        with (
            (folder / "data").open_data(size=12_000) as reader,
            pytest.raises(DamagedCheckpointError, match=r"data .*9000 b"),
        ):
            reader.read(8000, 2000)

    def test_many_data_files(self, folder: Location) -> None:
        contents = [noise(size, size) for size in (0, 5000, 1, 4096, 300_000, 7, 8, 9, 10, 11)]
        (folder / "d").make_directory()
        folder.write_data_files([DataFile(f"d/{at}", data.size, whole(data)) for at, data in enumerate(contents)])
        for number, data in enumerate(contents):
            assert (folder / "d" / str(number)).read_bytes() == data.tobytes()
        wrong = [DataFile(f"d/{number}", 10, whole(noise(10 + (number == 3)))) for number in range(8)]
        with pytest.raises(ValueError, match="segment"):
            folder.write_data_files(wrong)

    def test_a_snapshot_looks_like_the_place(self, folder: Location) -> None:
        for name in ("run/1/file", "run/2/file", "run/2/more", "run2/file", "run-3/file", "run/file"):
            (folder / name).parent.make_directory()
            (folder / name).write_bytes(name.encode())
        seen = (folder / "run").snapshot()
        for place, same in ((seen, folder / "run"), (seen / "2", folder / "run" / "2"), (seen.parent, folder)):
            assert [entry.name for entry in place.entries()] == [entry.name for entry in same.entries()]
            assert (place.is_directory(), place.exists(), place.url) == (True, True, same.url)
        assert (seen / "2" / "file").read_bytes() == b"run/2/file"
        assert (seen / "2" / "file").is_there()
        assert not (seen / "2" / "fil").exists()
        assert not (seen / "3").is_directory()
        assert (seen.parent / "run2" / "file").is_there()
        assert not (folder / "absent").snapshot().exists()

    @pytest.mark.parametrize("name", NAMES)
    def test_names(self, folder: Location, name: str) -> None:
        (folder / name / name).parent.make_directory()
        (folder / name / name).write_bytes(name.encode())
        assert [entry.name for entry in folder.entries()] == [name]
        assert folder.entries()[0].is_directory
        assert [entry.name for entry in (folder / name).entries()] == [name]
        assert as_location((folder / name / name).url).read_bytes() == name.encode()
        (folder / name).rename("renamed")
        assert (folder / "renamed" / name).read_bytes() == name.encode()
        (folder / "renamed").remove_tree()
        assert folder.entries() == []

    def test_entries_are_sorted_and_hide_locks(self, folder: Location) -> None:
        (folder / "b" / "deep").make_directory()
        (folder / "b" / "deep" / "file").write_bytes(b"1")
        for name in ("c", "a", "a.__lock", "10", "9"):
            (folder / name).write_bytes(b"123")
        listed = [(entry.name, entry.is_directory) for entry in folder.entries()]
        assert listed == [("10", False), ("9", False), ("a", False), ("b", True), ("c", False)]
        assert {entry.size for entry in folder.entries() if not entry.is_directory} <= {3, None}
        assert next(entry for entry in folder.entries() if entry.is_directory).size is None

    def test_a_name_that_begins_alike_is_another(self, folder: Location) -> None:
        (folder / "step").make_directory()
        for name in ("step/file", "step0", "step-1"):
            (folder / name).write_bytes(b"1")
        assert (folder / "step0").is_there()
        for name in ("ste", "step0/below", "step/fil"):
            assert not (folder / name).is_there()
        assert [entry.name for entry in (folder / "step").entries()] == ["file"]
        (folder / "step").remove_tree()
        assert [entry.name for entry in folder.entries()] == ["step-1", "step0"]

    def test_make_directory_twice(self, root: Location) -> None:
        (root / "a" / "b").make_directory()
        (root / "a" / "b").make_directory(sync=False)
        (root / "a" / "b" / "file").write_bytes(b"")
        (root / "a" / "b").sync_directory()
        assert (root / "a").is_directory()
        assert (root / "a").exists()

    def test_rename(self, folder: Location) -> None:
        (folder / "old" / "inside").make_directory()
        for name in ("old/inside/file", "old.not", "file", "taken"):
            (folder / name).write_bytes(name.encode())
        assert (folder / "file").rename("taken") == folder / "taken"
        assert (folder / "taken").read_bytes() == b"file"
        assert not (folder / "file").exists()
        (folder / "old").rename("new")
        assert (folder / "new" / "inside" / "file").read_bytes() == b"old/inside/file"
        assert [entry.name for entry in folder.entries()] == ["new", "old.not", "taken"]
        with pytest.raises(ObjectNotFoundError, match="nothing-here"):
            (folder / "nothing-here").rename("new")
        for name in ("../new", "a/b", "", "..", "/new"):  # it stays in the directory
            with pytest.raises(InvalidLocationError):
                (folder / "taken").rename(name)
        assert (folder / "taken").read_bytes() == b"file"

    def test_remove_and_remove_tree(self, folder: Location) -> None:
        for name in ("x/1", "x/y/2", "x/y/z/3", "kept"):
            (folder / name).parent.make_directory()
            (folder / name).write_bytes(b"1")
        (folder / "x").remove_tree(last="1")
        (folder / "x").remove_tree()
        assert [entry.name for entry in folder.entries()] == ["kept"]
        (folder / "kept").remove_tree()
        assert folder.entries() == []
        (folder / "file").write_bytes(b"1")
        (folder / "file").remove()
        (folder / "file").remove()
        assert not (folder / "file").exists()

    @pytest.mark.parametrize(
        ("size", "pieces"),
        [
            *((size, {0: size}) for size in (0, 1, 4095, 4096, 4097, 3 * MIB + 5)),
            (13 * MIB + 3, {4096: 5000, 16384: 9 * MIB + 17, 10 * MIB: 0, 12 * MIB: 4096}),
        ],
        ids=["0", "1", "4095", "4096", "4097", "3 MiB", "gaps and tails"],
    )
    def test_data(self, folder: Location, size: int, pieces: dict[int, int]) -> None:
        expected, segments = np.zeros(size, np.uint8), []
        for offset, length in pieces.items():
            expected[offset : offset + length] = data = noise(length, offset)
            segments.append(segment(offset, data, 300_000))
        (folder / "data").write_data(size, segments)
        with (folder / "data").open_data() as reader:
            assert reader.size == size
            assert np.array_equal(reader.read(0, size), expected)
        assert (folder / "data").read_bytes() == expected.tobytes()

    def test_data_replaces(self, folder: Location) -> None:
        (folder / "data").write_data(9000, whole(noise(9000)))
        with (folder / "data").open_data() as reader:
            (folder / "data").write_data(100, whole(noise(100, 5)))
            assert reader.size in (9000, 100)
        assert (folder / "data").read_bytes() == noise(100, 5).tobytes()

    def test_parts_in_any_memory(self, folder: Location) -> None:
        """It may be used again for the next part, be read-only, or be empty."""
        scratch, fixed = np.empty(1000, np.uint8), noise(5000)
        fixed.flags.writeable = False

        def parts() -> Iterator[NDArray[np.uint8]]:
            for value in range(20):
                scratch[:] = value
                yield scratch

        fixed_parts = [fixed[:0], fixed[:10], fixed[10:10], fixed[10:]]
        (folder / "data").write_data(
            25_480, [Segment(0, 20_000, parts), Segment(20_480, 5000, lambda: iter(fixed_parts))]
        )
        used_again = bytes(value for value in range(20) for _ in range(1000))
        assert (folder / "data").read_bytes() == used_again + bytes(480) + fixed.tobytes()

    def test_every_segment_runs_equally_often(self, folder: Location) -> None:
        runs: list[int] = []

        def parts(number: int) -> Iterator[NDArray[np.uint8]]:
            runs.append(number)
            yield np.full(4096, number, np.uint8)

        segments = [Segment(number * 4096, 4096, partial(parts, number)) for number in range(64)]
        (folder / "data").write_data(64 * 4096, segments)
        assert set(runs) == set(range(64))
        assert len(runs) == runs.count(0) * 64, "twice where bytes are hashed before they are sent"
        assert (folder / "data").read_bytes() == bytes(number for number in range(64) for _ in range(4096))

    @pytest.mark.parametrize(
        ("size", "segments"),
        [
            (4096, [(100, 10)]),
            (100, [(0, 101)]),
            (20_000, [(0, 4097), (4096, 10)]),
            (20_000, [(8192, 10), (4096, 10)]),
            (20_000, [(-4096, 10)]),
        ],
        ids=["unaligned", "too-long", "overlap", "order", "negative"],
    )
    def test_segments_that_do_not_fit(self, folder: Location, size: int, segments: list[tuple[int, int]]) -> None:
        with pytest.raises(ValueError, match="segment"):
            (folder / "data").write_data(size, [segment(offset, noise(length)) for offset, length in segments])
        assert not (folder / "data").exists()

    @pytest.mark.parametrize("length", [0, 10, 9_999, 10_001, 30_000, 6 * MIB], ids=str)
    def test_parts_of_another_length(self, folder: Location, length: int) -> None:
        wrong = Segment(4096, 10_000, lambda: iter([noise(length)]))
        good = [segment(0, noise(100)), segment(40_960, noise(100))]
        with pytest.raises(ValueError, match=r"offset 4096 should have 10000 bytes"):
            (folder / "data").write_data(50_000, [good[0], wrong, good[1]])
        assert not (folder / "data").exists()

    def test_an_error_in_a_part_is_passed_on(self, folder: Location) -> None:
        def parts() -> Iterator[NDArray[np.uint8]]:
            yield noise(10)
            raise KeyError("the leaf is gone")

        others = [segment(number * MIB, noise(MIB)) for number in range(8)]
        with pytest.raises(KeyError, match="the leaf is gone"):
            (folder / "data").write_data(9 * MIB, [*others, Segment(8 * MIB, 20, parts)])
        assert folder.entries() == []

    def test_reading_past_the_end(self, folder: Location) -> None:
        (folder / "data").write_data(10_000, whole(noise(10_000)))
        with (folder / "data").open_data() as reader:
            for offset, length in ((0, 10_001), (9_999, 2), (10_000, 1), (1 << 62, 8), (0, 1 << 62), (-1, 5), (5, -1)):
                with pytest.raises(DamagedCheckpointError, match=r"data .*10000 bytes"):
                    reader.read(offset, length)

    @settings(deadline=None, max_examples=15, suppress_health_check=SHARED)
    @given(extents=st.lists(st.tuples(st.integers(0, 2 * MIB), st.integers(0, MIB)), max_size=6))
    def test_any_extent(self, folder: Location, extents: list[tuple[int, int]]) -> None:
        data = noise(3 * MIB)
        if not (folder / "data").exists():
            (folder / "data").write_data(data.size, whole(data))
        buffer = Buffer()
        with (folder / "data").open_data() as reader:
            for offset, length in extents:
                fresh = reader.read(offset, length)
                assert np.array_equal(fresh, data[offset : offset + length])
                assert np.array_equal(reader.read(offset, length, buffer), fresh)

    def test_fresh_memory_outlives_the_reader(self, folder: Location) -> None:
        data = noise(5 * MIB)
        (folder / "data").write_data(data.size, whole(data))
        with (folder / "data").open_data() as reader:
            array = reader.read(64, 4 * MIB)
        (folder / "data").remove()
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0
        array[0] ^= 255
        assert np.array_equal(array[1:], data[65 : 64 + 4 * MIB])

    def test_concurrent_reads(self, folder: Location) -> None:
        data = noise(8 * MIB)
        (folder / "data").write_data(data.size, whole(data))

        def work(seed: int) -> bool:
            random, buffer = np.random.default_rng(seed), Buffer(MIB)
            return all(
                np.array_equal(reader.read(offset, MIB, buffer if turn % 2 else None), data[offset : offset + MIB])
                for turn, offset in enumerate(map(int, random.integers(0, 7 * MIB, 12)))
            )

        with (folder / "data").open_data() as reader, ThreadPoolExecutor(6) as threads:
            assert all(threads.map(work, range(6)))


class TestLocalDisk(BackendConformance):
    @pytest.fixture
    def root(self, tmp_path: pathlib.Path) -> Location:
        return as_location(tmp_path / "some where")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
class TestTmpfs(BackendConformance):
    @pytest.fixture
    def root(self) -> Iterator[Location]:
        folder = tempfile.mkdtemp(prefix="holdfast-", dir="/dev/shm")
        yield as_location(folder) / "root"
        shutil.rmtree(folder)


class TestMemory(BackendConformance):
    @pytest.fixture
    def root(self) -> Iterator[Location]:
        place = as_location(f"memory://{uuid.uuid4().hex}/some%20where")
        yield place
        place.parent.remove_tree()


class TestFolderInMemory(BackendConformance):
    @pytest.fixture
    def root(self) -> Location:
        return folder_in_memory(as_location("memory://zip file"), {}) / "some where"

    @pytest.mark.parametrize("name", NAMES)
    def test_names(self, folder: Location, name: str) -> None:
        """The URL of a file in it is only shown."""
        (folder / name / name).write_bytes(name.encode())
        assert (folder / name / name).read_bytes() == name.encode()
        assert [entry.name for entry in folder.entries()] == [name]

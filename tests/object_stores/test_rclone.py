"""A server that is not ours, ``rclone serve s3``: it ignores conditions, and sends ranges with the status 200."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.storage import Segment, as_location, location


def test_without_ranges_objects_are_read_as_a_whole(rclone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore refuses a range with the status of a whole object."""
    monkeypatch.setattr(location, "UPLOADS", 1)  # rclone may answer 500 to two that go to one folder at a time
    tree: dict[str, Any] = {
        "w": np.arange(2_000_000, dtype=np.float32),
        "small": {str(n): np.full(n, n) for n in range(50)},
    }
    layout = hf.Layout(chunk_bytes=1 << 20, segment_bytes=1 << 20, upload_bytes=2 << 20)
    hf.save(f"{rclone}/ckpt", tree, layout=layout)
    found: dict[str, Any] = hf.load(f"{rclone}/ckpt")
    assert np.array_equal(found["w"], tree["w"])
    assert [found["small"][str(n)].tolist() for n in range(50)] == [[n] * n for n in range(50)]
    assert hf.verify(f"{rclone}/ckpt").ok


def test_it_copies_objects_itself(rclone: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5_000_000, np.uint8)
    place, copy = as_location(f"{rclone}/a b+c"), as_location(f"{rclone}/copy/ü")
    place.write_data(data.size, [Segment(0, data.size, lambda: iter([data]))])
    assert place.can_share()
    place.share(copy, place.identity())
    place.remove()
    assert copy.read_bytes() == data.tobytes()
    with pytest.raises(OSError, match="did not copy"):
        place.share(copy, place.identity())
    assert place.can_share()


def test_conditions_are_found_to_be_ignored(rclone: str) -> None:
    place = as_location(f"{rclone}/object")
    place.write_bytes(b"content")
    assert not place.honours_conditions(b"content")
    assert place.read_bytes() == b"content"

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same

from holdfast.engine.errors import OptionError
from holdfast.recipes.digits import Batches, split_digits
from holdfast.recipes.flax_text import Windows, help_texts, windows


def test_the_digits_are_split_without_overlap_or_loss() -> None:
    training, validation = split_digits(0.2, seed=0)

    assert len(training.labels) + len(validation.labels) == 1797
    assert len(validation.labels) == 359
    assert training.pixels.dtype == np.float32
    assert training.pixels.shape == (1438, 64)
    assert (training.pixels.min(), training.pixels.max()) == (0.0, 1.0)
    together = np.concatenate([training.pixels, validation.pixels])
    again = np.concatenate([part.pixels for part in split_digits(0.2, seed=1)])
    assert not np.array_equal(together, again)
    assert np.array_equal(np.sort(together, axis=0), np.sort(again, axis=0))


def test_an_epoch_visits_every_image_once_in_a_new_order() -> None:
    training, _ = split_digits(0.2, seed=0)
    batches = Batches(training, batch_size=100, seed=0)
    epochs = [list(itertools.islice(batches, 14)) for _ in range(2)]

    for epoch in epochs:
        rows = {row.tobytes() for batch in epoch for row in batch.pixels}
        assert len(rows) == 1400
    assert not np.array_equal(epochs[0][0].pixels, epochs[1][0].pixels)


def test_the_help_texts_are_numbered_by_their_alphabet() -> None:
    corpus = help_texts(0.1)
    text = "".join(corpus.alphabet[number] for number in corpus.training)

    assert len(corpus.training) > 300_000
    assert len(corpus.validation) == round((len(corpus.training) + len(corpus.validation)) * 0.1)
    assert "assert" in text
    assert corpus.training.max() < len(corpus.alphabet)


def test_windows_are_cut_from_the_text() -> None:
    numbers = np.arange(100, dtype=np.int32)
    cut = windows(numbers, context=9, count=4)

    assert cut.shape == (4, 10)
    assert cut[0].tolist() == list(range(10))
    assert cut[-1].tolist() == list(range(90, 100))


def batches_of(kind: str) -> Any:
    if kind == "digits":
        return Batches(split_digits(0.2, seed=0)[0], batch_size=100, seed=7)
    return Windows(help_texts(0.1), batch_size=4, context=16, seed=3)


@pytest.mark.parametrize(
    ("kind", "done"),
    [*(("digits", done) for done in (0, 1, 13, 14, 15, 28, 40)), *(("text", done) for done in (0, 1, 5))],
)
def test_batches_go_on_where_they_were(kind: str, done: int) -> None:
    first, second = batches_of(kind), batches_of(kind)
    for _ in range(done):
        next(first)
    next(second)
    second.set_state(first.get_state())
    for expected, found in itertools.islice(zip(first, second, strict=True), 20):
        assert_same(found, expected)
    assert repr(next(first)) != repr(next(first))


def test_windows_of_another_text_are_refused() -> None:
    batches = batches_of("text")
    assert next(batches).shape == (4, 17)
    with pytest.raises(OptionError, match=r"trained on a different text: expected CRC-32 [0-9a-f]{8}, found 0000007b"):
        batches.set_state({"batch": 3, "fingerprint": 123})

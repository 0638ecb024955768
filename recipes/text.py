"""Python's help texts as characters, and random windows of them in a repeatable order."""

from __future__ import annotations

import pydoc_data.topics
import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import OptionError


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        alphabet: Every character that occurs, sorted.
        training: int32[n], the indices of the characters to train on.
        validation: int32[m], those held back.
        fingerprint: The CRC-32 of the text; another version of Python has another text.
    """

    alphabet: str
    training: NDArray[np.int32]
    validation: NDArray[np.int32]
    fingerprint: int


def help_texts(validation_fraction: float) -> Corpus:
    """Return all topics of Python's ``help()``, in alphabetical order; the end of the text is held back."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: number for number, character in enumerate(alphabet)}
    numbers = np.fromiter((index[character] for character in text), np.int32, len(text))
    cut = round(len(numbers) * (1 - validation_fraction))
    return Corpus(alphabet, numbers[:cut], numbers[cut:], zlib.crc32(text.encode()))


def windows(numbers: NDArray[np.int32], context: int, count: int) -> NDArray[np.int32]:
    """Return int32[count, context + 1]: windows spread evenly over the text."""
    starts = np.linspace(0, len(numbers) - context - 1, count).astype(np.int64)
    return _cut(numbers, starts, context)


class Windows:
    """Endless batches of random windows, int32[batch_size, context + 1].

    A batch depends on the seed and its number alone, so that one integer is the whole state.

    Args:
        corpus: The text to draw from.
        batch_size: Windows in a batch.
        context: Characters in a window, without the one more that is to be predicted last.
        seed: Decides which windows.
    """

    def __init__(self, corpus: Corpus, batch_size: int, context: int, seed: int) -> None:
        self._corpus = corpus
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._batch = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NDArray[np.int32]:
        numbers = self._corpus.training
        draw = np.random.default_rng([self._seed, self._batch])
        starts = draw.integers(0, len(numbers) - self._context, self._batch_size)
        self._batch += 1
        return _cut(numbers, starts, self._context)

    def get_state(self) -> dict[str, Any]:
        """Return how many batches were drawn, and from which text."""
        return {"batch": self._batch, "fingerprint": self._corpus.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that :meth:`get_state` returned.

        Raises:
            OptionError: The position belongs to another text.
        """
        if state["fingerprint"] != self._corpus.fingerprint:
            raise OptionError(
                f"the checkpoint was trained on another text: expected CRC-32 {self._corpus.fingerprint:08x}, found "
                f"{int(state['fingerprint']):08x}; resume with the version of Python that began the run"
            )
        self._batch = int(state["batch"])


def _cut(numbers: NDArray[np.int32], starts: NDArray[np.int64], context: int) -> NDArray[np.int32]:
    chosen: NDArray[np.int32] = numbers[starts[:, None] + np.arange(context + 1)]
    return chosen

"""scikit-learn's digits (1797 images of 8 x 8 pixels in 10 classes), in batches with a reproducible order."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no type information

CLASSES = 10


class Images(NamedTuple):
    """Images with their class labels."""

    pixels: NDArray[np.float32]  # [n, 64], from 0 to 1
    labels: NDArray[np.int32]  # [n], from 0 to 9

    def part(self, chosen: slice | NDArray[np.int64]) -> Images:
        """Return the images at the given indices."""
        return Images(self.pixels[chosen], self.labels[chosen])


def split_digits(validation_fraction: float, seed: int) -> tuple[Images, Images]:
    """Split the digits into training and validation images; the split depends on the seed."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = Images((pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32))
    held_back = round(len(labels) * validation_fraction)
    return images.part(slice(held_back, None)), images.part(slice(held_back))


class Batches:
    """An endless iterator over shuffled batches; the order depends only on the seed and the epoch."""

    def __init__(self, images: Images, batch_size: int, seed: int) -> None:
        self._images = images
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Images:
        if self._position + self._batch_size > len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return self._images.part(chosen)

    def get_state(self) -> dict[str, Any]:
        """Return the position: the epoch, and the number of images already used in the epoch."""
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position returned by :meth:`get_state`."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()

    def _shuffled(self) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._images.labels))

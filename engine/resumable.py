"""``hf.resumable``: epoch loops over a plain loader that can be resumed in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from .errors import OptionError, StateError
from .loaders import ENDED, TAKEN, Announce, LoaderPosition, OrderState, fingerprint, is_accelerate_loader
from .pytree import loaded

_logger = logging.getLogger("holdfast")

_OTHER_LOOPS = (
    "some loops over the data of hf.resumable have no on_step in them, and others have: each counts as an epoch, and a "
    "resume in a loop of the training begins with that number. Use the DataLoader itself for all other loops"
)
_NOTHING_LEFT = (
    "all batches of epoch %d were taken at the save: its loop over the data is empty, and the code after it runs. A "
    "name that the loop sets, such as loss, is not set there"
)


class ResumableLoader(LoaderPosition):
    """A loader whose epoch loops can be saved and resumed; see :func:`resumable`."""

    _function = "resumable"
    replicated_state = False

    def __init__(
        self,
        loader: Any,
        batches_per_epoch: int | None = None,
        generators: Sequence[Any] = (),
        state: OrderState | None = None,
        redraw: Literal["batches", "indices"] = "batches",
    ) -> None:
        super().__init__(loader, generators, state)
        if is_accelerate_loader(loader):
            raise OptionError(
                f"this {type(loader).__qualname__} of accelerate counts the epochs itself, and would count from 0 "
                "after a resume: pass the DataLoader that was prepared to resumable, or this one to skip_to, which "
                "tells it the epoch"
            )
        if batches_per_epoch is not None and (type(batches_per_epoch) is not int or batches_per_epoch < 1):
            raise OptionError(f"batches_per_epoch={batches_per_epoch!r} must be a number of batches, from 1")
        if redraw not in ("batches", "indices"):
            raise OptionError(f"redraw={redraw!r} must be 'batches' or 'indices'")
        self._has_indices = _has_indices(loader)
        if redraw == "indices" and not self._has_indices:
            raise OptionError(
                f"redraw='indices' needs a DataLoader of torch over a dataset with indices, not a "
                f"{type(loader).__qualname__}: leave it out, and earlier batches are drawn again"
            )
        self._most = batches_per_epoch
        self._asked = False  # whether a loop, possibly an empty one, has started since a state was set
        self._turn = 0  # counter that changes when a loop starts or a state is set
        self._reported = 0  # value of _turn at the last reported step
        self._loops: set[bool] | None = set()  # whether loops reported steps (or both values); None once warned
        if redraw == "indices":
            self._indices = _Indices(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
            self._source, self._loads_again = _with_order(loader, self._indices), False

    @property
    def batch(self) -> int:
        """The number of batches taken in this epoch; ``enumerate(loader, loader.batch)`` continues the count."""
        return self._taken

    def __len__(self) -> int:
        return self._length() or len(self._loader)

    def __getattr__(self, name: str) -> Any:  # public attributes are delegated to the wrapped loader
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._restored and self._asked:  # the previous loop took no batch, for example because zip ended first
            self._take_up()
            self._move(self.epoch + 1, 0)
        self._asked = True
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        if self._batches is not None:
            self._move(self.epoch + 1, 0)  # the previous loop ended early, but its generator has not been closed
        self._turn += 1
        turn, given, is_rest = self._turn, False, bool(self._restored)
        try:
            if self._is_stopped():
                return
            if self._restored:
                self._take_up()
            else:
                self._begin(self.epoch)
            while batch := self._draw():
                given = True
                self.checksum = fingerprint(batch[0])
                yield batch[0]
                if turn != self._turn:
                    raise StateError(
                        "another loop over the same resumable loader has begun, or a state was restored, while this "
                        "one was under way. It has one place: use the DataLoader itself for other loops, and begin a "
                        "new loop after a restore"
                    )
                if self._exit_status is not None:
                    return
        finally:
            if turn == self._turn:
                is_reported = self._reported == turn
                # After a resume, the rest of an epoch may be too short for an update, so that its loop reports no step.
                if given and self._loops is not None and (is_reported or not is_rest):
                    self._loops.add(is_reported)
                self._move(self.epoch + 1, 0)

    def _take_up(self) -> None:
        if self._has_ended:
            self._take_restored()
            _logger.info(_NOTHING_LEFT, self.epoch)
        else:
            self._go_to(self.epoch, self._taken)

    def get_state(self) -> dict[str, Any]:
        """Return the epoch, the number of batches taken from it, and the states that determine its order."""
        self._reported = self._turn
        if self._batches is not None and self._loops is not None and len(self._loops) == 2:
            self._loops = None
            _logger.warning(_OTHER_LOOPS)
        return self._beginning()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position, so that the next ``for`` yields the remaining batches of its epoch."""
        if TAKEN not in state:
            raise StateError(
                f"the state of a resumable loader has the epoch and the batches taken, and this one has "
                f"{', '.join(map(str, state)) or 'nothing'}: it was saved of another object"
            )
        self._move(*state[TAKEN])
        self._asked = False
        self._restore(state)
        self._has_ended = state.get(ENDED, False)

    def begin_run(self, announce: Announce) -> None:
        """Begin a run. Batches taken before a new run, for example to inspect the data, do not count."""
        super().begin_run(announce)
        self._loops = set()
        self._announce = announce if self._loads_again and self._has_indices else None
        if not self._restored:
            self._move(0, 0)

    def _move(self, epoch: int, taken: int) -> None:
        self._turn += 1
        self.epoch, self._taken, self._batches, self._has_ended, self._next = epoch, taken, None, False, []

    def _redraw(self, count: int) -> tuple[int | None, bool]:
        if self._loads_again:
            return super()._redraw(count)
        self._indices.skip()
        self._taken = count
        self._note_drawn()
        return None, False

    def _open(self, left_out: int = 0) -> Iterator[Any]:
        if self._loads_again:
            return super()._open()
        self._indices.left = left_out
        return iter(self._source)

    def _length(self) -> int:
        return min((length for length in (super()._length(), self._most) if length), default=0)


def resumable(
    loader: Iterable[Any],
    *,
    batches_per_epoch: int | None = None,
    generators: Sequence[Any] = (),
    state: tuple[Callable[[], Any], Callable[[Any], object]] | None = None,
    redraw: Literal["batches", "indices"] = "batches",
) -> ResumableLoader:
    """Return a loader for epoch loops that can be resumed in the middle of an epoch, bit for bit.

    ::

        loader = hf.resumable(DataLoader(dataset, batch_size=32, shuffle=True))
        with hf.CheckpointCallback("runs/digits", save_interval_steps=100) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=loader)
            for epoch in range(loader.epoch, 10):
                for batch in loader:
                    ...
                    step += 1
                    checkpoint.on_step(step, state, data=loader)

    The first ``for`` after a resume yields the remaining batches of the epoch. If the step was saved after the last
    batch, none remain, and the program continues with the code after the inner loop. A ``for`` after a ``break`` begins
    a new epoch. After the callback has stopped the run, the loader yields no batches, and no steps are saved.

    A resume draws the earlier batches of the epoch again, as with :func:`skip_to`, whose documentation lists the values
    that the order may depend on. However, the program must call ``set_epoch`` itself, before the ``for``.
    In a program with several processes, each process has its own position.

    Args:
        loader: An iterable of batches, such as a ``DataLoader``, a list, an array, a Grain or Hugging Face dataset,
            or an object with ``__iter__``.
        batches_per_epoch: The number of batches after which each ``for`` ends; pass it if the loops always ``break``
            after that number. None continues to the end of the loader.
        generators: Other Python, numpy and torch generators that the loader uses, as for :func:`skip_to`.
        state: Two functions, ``get`` and ``set``, for other values that the order depends on, as for :func:`skip_to`.
        redraw: With ``"batches"``, a resume loads the earlier batches of the epoch again. With ``"indices"``, it only
            advances the sampler of a ``DataLoader``, without loading or comparing batches. Each item may then depend
            only on its index: neither the dataset nor its workers may draw random numbers.

    Returns:
        The loader. Its attribute ``epoch`` is the number of completed epochs, ``batch`` is the number of batches taken
        in the current epoch, and ``len`` returns the number per epoch; other attributes are delegated to ``loader``.
        Callbacks and ``holdfast.graph`` save and restore it through ``get_state`` and ``set_state``.

    Raises:
        OptionError: The loader is an iterator, which cannot be restarted, or counts its epochs itself, as Fabric and
            Accelerate loaders do; or an argument is invalid, or the loader does not support ``redraw="indices"``.

    >>> loader = resumable(["a", "b", "c"])
    >>> [(loader.epoch, loader.batch, letter) for _ in range(2) for letter in loader][2:4]
    [(0, 3, 'c'), (1, 1, 'a')]
    """
    return ResumableLoader(loader, batches_per_epoch, generators, state, redraw)


class _Indices:
    """An iterator over a sampler's indices that can skip the first ``left`` of them."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._rest: Iterator[Any] = iter(())
        self.left = 0

    def __iter__(self) -> Iterator[Any]:
        self._rest = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()  # here, not in __iter__, because the loader must draw its workers' seed first
        return next(self._rest)

    def skip(self) -> None:
        count, self.left = self.left, 0
        for _ in islice(self._rest, count):
            pass


def _has_indices(loader: Any) -> bool:
    """Return whether a loader is torch's own DataLoader, not a subclass, and has a map-style dataset."""
    torch: Any = loaded("torch")
    data = None if torch is None else torch.utils.data
    return data is not None and type(loader) is data.DataLoader and not isinstance(loader.dataset, data.IterableDataset)


def _with_order(loader: Any, order: _Indices) -> Any:
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
    )
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.batch_sampler is None:
        return type(loader)(loader.dataset, sampler=order, batch_size=None, **options)
    return type(loader)(loader.dataset, batch_sampler=order, **options)

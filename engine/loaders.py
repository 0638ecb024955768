"""Save and restore a plain loader's position in its data, and detect loaders of other libraries."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from .errors import OptionError, StateError, shortened
from .generators import as_tree, capture, generator_state, is_generator, restore, same_state, set_generator_state
from .pytree import PLAIN, expand, is_dense, is_leaf, is_torch_tensor, loaded

_logger = logging.getLogger("holdfast")

# ---- loaders of other libraries


def is_torchdata_loader(obj: object) -> bool:
    return derives(obj, "StatefulDataLoader", "torchdata.")


def nodes_of(obj: Any) -> list[Any]:
    """Return the nodes of a torchdata.nodes ``Loader``, starting with the root, or [] for other objects."""
    nodes: list[Any] = []
    left = [obj.root] if derives(obj, "Loader", "torchdata.nodes.") else []
    while left:
        node = left.pop()
        if derives(node, "BaseNode", "torchdata.nodes.") and not any(node is other for other in nodes):
            nodes.append(node)
            for value in vars(node).values():
                left += value.values() if isinstance(value, dict) else [value]
    return nodes


def is_accelerate_loader(obj: object) -> bool:
    """Return whether a loader was created by ``Accelerator.prepare``; such loaders mimic the loader that they wrap."""
    return derives(obj, "DataLoaderAdapter", "accelerate.")


def derives(obj: object, name: str, package: str) -> bool:
    """Return whether an object's class or one of its base classes has this name and is defined in ``package``."""
    return any(cls.__name__ == name and cls.__module__.startswith(package) for cls in type(obj).__mro__)


# ---- loaders without a state

DRAWING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")  # torch samplers that draw random numbers
TAKEN = "taken"  # the epoch, and the number of batches taken from it
_BEGUN = "generators"  # generator states by name: at the start of the epoch, or at its end if the epoch has ended
_ORDER = "state"  # value that the user's state function returned when the states in _BEGUN were taken
_VALUES = "attributes"  # numbers and small arrays in the loader's attributes; only saved by earlier holdfast versions
LAST = "last"  # checksum of the latest batch, which a resume compares with the redrawn batch
ENDED = "ended"  # whether the latest batch was the last of its epoch
_NOW = "now"  # like _BEGUN and _ORDER, but at the time of the save, because other code may change states mid-epoch
_PARTS = (TAKEN, ENDED, _BEGUN, _NOW, _ORDER, LAST)
_HANDED = "generators."  # name prefix of generators passed by the user
_MOST_VALUES = 1000  # maximum number of batch values that a checksum covers
_MOST_REFUSED = 10_000  # maximum number of batch requests after a stop; ends loops such as ``while step < total``
_LONG = 5.0  # seconds of redrawing after which a message is logged
_STILL_DRAWING = (
    "drawing the earlier batches of the epoch again, %d of %d so far. If the dataset and its workers draw no random "
    "numbers, hf.resumable(loader, redraw='indices') loads none of them"
)

OrderState = tuple[Callable[[], Any], Callable[[Any], object]]  # getter and setter of a value that the order depends on
Announce = Callable[..., object]  # receives a message and its format arguments, like the methods of a logger


class LoaderPosition:
    """Base class of the loaders returned by :func:`skip_to` and ``resumable``; it tracks the position in the data."""

    _function = "skip_to"  # name of the public function, for messages

    def __init__(self, loader: Any, generators: Sequence[Any] = (), state: OrderState | None = None) -> None:
        self._loader: Any = loader
        self._loads_again = True  # whether a resume loads the earlier batches again
        _check_loader(loader, self._function, has_state=state is not None)
        _check_handed(generators, state)
        handed = {f"{_HANDED}{index}": generator for index, generator in enumerate(generators)}
        self._generators = _each_once(generators_of(loader) | handed, besides=_global_generators())
        self._state = state
        self._batches: Iterator[Any] | None = None
        self.epoch = self._taken = 0  # the current epoch (from 0) and the number of batches taken from it
        self._most: int | None = None  # batches per epoch, if set by the program
        self._has_ended = False  # whether the epoch's last batch has been taken
        self._begun: dict[str, Any] = {}  # generator states, and value of the state function, at the start of the epoch
        self._drawn: list[str] = []  # global generators that changed before the epoch's first batch
        self._restored: Mapping[str, Any] = {}  # state to apply at the next batch
        self.checksum: int | None = None  # checksum of sampled values in the last batch
        self._next: list[Any] = []  # a batch drawn in advance, if the loader yields more batches than its length
        self._announce: Announce | None = None
        self._exit_status: int | None = None  # set when the run is stopped
        self._refused = 0  # number of requests for batches since the stop

    @property
    def left(self) -> int | None:
        """The number of batches left in the epoch, or None if the loader's length is unknown or zero."""
        return max(0, self._length() - self._taken) if self._length() else None

    def begin_run(self, announce: Announce) -> None:
        """Begin a new or resumed run. ``announce`` logs a message for the user."""
        self._exit_status, self._refused = None, 0

    def end_run(self, exit_status: int) -> None:
        """Stop yielding batches. If the program keeps requesting batches, exit with ``exit_status``."""
        self._exit_status = exit_status

    def _is_stopped(self) -> bool:
        """Return whether the run was stopped; exit if the program keeps requesting batches after that."""
        if self._exit_status is None:
            return False
        self._refused += 1
        if self._refused > _MOST_REFUSED:
            _logger.warning("the program asks for batches although the run was stopped, and ends here")
            raise SystemExit(self._exit_status)
        return True

    def _length(self) -> int:
        try:
            return len(self._loader)
        except TypeError:  # the loader or its dataset has no length
            return 0

    def _beginning(self) -> dict[str, Any]:
        """Return the position and the states at the start of this epoch, or of the next epoch if this one has ended."""
        own_states = self._own_states()
        if self._restored:  # other code may have drawn from the generators since
            parts = {name: self._restored[name] for name in _PARTS if name in self._restored}
            return {**parts, _NOW: own_states} if own_states else parts
        state: dict[str, Any] = {TAKEN: [self.epoch, self._taken]}
        state |= {} if self.checksum is None else {LAST: self.checksum}
        if self._batches is None or self._has_ended:
            # The next epoch draws from the current states of the global generators, which are saved elsewhere.
            begun = own_states
            state |= {ENDED: True} if self._has_ended else {}
        else:
            begun = {name: self._begun[name] for name in (*self._drawn, *own_states)}
            state |= {_NOW: own_states} if own_states else {}
        order = {_ORDER: begun.pop(_ORDER)} if _ORDER in begun else {}
        return {**state, **({_BEGUN: begun} if begun else {}), **order}

    def _own_states(self) -> dict[str, Any]:
        """Return the states of the loader's generators, and the value that the user's state function returns."""
        states = {name: generator_state(generator) for name, generator in self._generators.items()}
        # Copy the value, because the program may modify it later.
        return states if self._state is None else {**states, _ORDER: copy.deepcopy(self._state[0]())}

    def _set_own_states(self, states: Mapping[str, Any]) -> None:
        for name in states.keys() & self._generators.keys():
            set_generator_state(self._generators[name], states[name])
        if self._state is not None and _ORDER in states:
            self._state[1](copy.deepcopy(states[_ORDER]))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the loader's generators now, because other code may share them; keep the rest for the next batch."""
        self._restored, self.checksum = state, state.get(LAST)
        self._set_own_states({**state, **state.get(_BEGUN, {}), **state.get(_NOW, {})})

    def _take_restored(self) -> tuple[Mapping[str, Any], bool]:
        """Return the saved state to continue from, and whether a warning was logged."""
        saved, self._restored, self._begun = self._restored, {}, {}
        return saved, self._warn_of_other_parts(saved, {*capture(), *self._generators})

    def _go_to(self, epoch: int, taken: int) -> None:
        """Draw the earlier batches of an epoch again, and reset all generators afterwards."""
        states = self._restored.get(_BEGUN, {})
        workers = getattr(self._loader, "num_workers", 0)
        lasts = bool(epoch and self._has_lasting_workers())
        if workers and taken and not states and not lasts:
            warn_of_new_workers(self._loader)
        before, own_states = as_tree(capture()), self._own_states()
        saved, told = self._take_restored()
        if taken:
            restore({name: states[name] for name in states.keys() & before.keys()})
            self._set_own_states({**saved, **states})
        self._begin(epoch)
        if not taken:
            return
        last, draws = self._redraw(taken)
        restore(before)
        self._set_own_states(own_states)
        if self.checksum is not None and last not in (None, self.checksum) and not (draws or lasts or told):
            self._warn_of_other_batches(taken)

    def _redraw(self, count: int) -> tuple[int | None, bool]:
        """Draw batches again; return the checksum of the last batch, and whether the dataset draws random numbers."""
        batch, at_first, began = None, None, time.monotonic()
        for done in range(1, count + 1):
            batch = self._draw()
            at_first = capture() if at_first is None else at_first
            if self._announce is not None and done < count and time.monotonic() - began > _LONG:
                self._announce(_STILL_DRAWING, done, count)
                self._announce = None
        # A dataset that uses global generators draws different numbers here, because no training steps draw in between.
        return fingerprint(batch[0]) if batch else 0, not same_state(at_first, capture())

    def _begin(self, epoch: int) -> None:
        if epoch and not self._begun and getattr(self._loader, "persistent_workers", False):
            if self._has_lasting_workers():
                warn_of_new_workers(self._loader)
            # In an uninterrupted run, persistent workers start in the first epoch, so start them before this epoch.
            before, own_states = as_tree(capture()), self._own_states()
            self._open()
            restore(before)
            self._set_own_states(own_states)
        self._begun = as_tree(capture()) | self._own_states()
        self._batches = self._open(self._taken)
        self.epoch, self._taken, self._drawn, self._next, self._has_ended = epoch, 0, [], [], False

    def _has_lasting_workers(self) -> bool:
        """Return whether workers keep random states over epochs; with redraw="indices", they draw no random numbers."""
        return bool(self._loads_again and getattr(self._loader, "persistent_workers", False))

    def _open(self, left_out: int = 0) -> Iterator[Any]:
        return iter(self._loader)

    def _note_drawn(self) -> None:
        now = as_tree(capture())
        self._drawn = [name for name, state in now.items() if not same_state(self._begun.get(name), state)]

    def _draw(self) -> list[Any]:
        """Return the next batch of the epoch in a list, which is empty at the end of the epoch."""
        if self._batches is None or (self._most is not None and self._taken >= self._most):
            return []
        batch, self._next = self._next or list(islice(self._batches, 1)), []
        if not batch:
            return []
        if not self._taken:
            self._note_drawn()
        self._taken += 1
        if self._taken == self._most:
            self._has_ended = True
        elif self._taken == self._length():
            if not is_accelerate_loader(self._loader):
                # Exhaust the loader now to run the rest of its code, because a resume would begin with the next epoch.
                self._next = list(islice(self._batches, 1))
            self._has_ended = not self._next
        return batch

    def _warn_of_other_parts(self, saved: Mapping[str, Any], names: Collection[str]) -> bool:
        """Warn about generators and values that only the checkpoint or only this run has; return whether any exist."""
        states = saved.get(_BEGUN, {})
        parts = [f"{name} (saved)" for name in (*states, *saved.get(_VALUES, ())) if name not in names]
        if _ORDER in saved and self._state is None:
            parts.append("state (saved)")
        if saved.get("position") or any(saved.get(TAKEN, ())):
            handed = [name for name in self._generators if name.startswith(_HANDED)]
            parts += [f"{name} (not saved)" for name in handed if name not in states]
            if self._state is not None and _ORDER not in saved:
                parts.append("state (not saved)")
        if parts:
            _logger.warning(
                "the position of a %s was saved with other parts than %s is given now: %s. They stay as the "
                "program has set them; if the order of the batches depends on them, it differs. Hand over all "
                "generators that the loader draws from, and what else its order depends on, before the run is saved: "
                "%s(loader, generators=[...], state=(get, set))",
                type(self._loader).__qualname__,
                self._function,
                shortened(parts),
                self._function,
            )
        return bool(parts)

    def _warn_of_other_batches(self, taken: int) -> None:
        _logger.warning(
            "batch %d of an epoch, which a %s has drawn again, differs from before the stop, and so may the rest of "
            "the epoch: it depends on something that is not as it was when the epoch began, such as scores that "
            "training changes, other data, a count of epochs, or a generator in the dataset. Hand it over: %s(loader, "
            "generators=[...], state=(get, set)). Or let set_epoch alone decide",
            taken,
            type(self._loader).__qualname__,
            self._function,
        )


class SkippedLoader(LoaderPosition, Iterator[Any]):
    """An iterator over a loader's batches, epoch after epoch, from a given position; see :func:`skip_to`."""

    def __init__(
        self,
        loader: Any,
        position: int,
        global_batch_size: int | None = None,
        generators: Sequence[Any] = (),
        state: OrderState | None = None,
    ) -> None:
        super().__init__(loader, generators, state)
        self._global_batch_size = global_batch_size
        if global_batch_size is not None:
            _check_global(loader, global_batch_size, hands_over=bool(len(generators) or state is not None))
        self.position = position  # the number of batches taken, over all epochs

    def __next__(self) -> Any:
        if self._is_stopped():
            raise StopIteration("the run was stopped: leave the loop when should_stop is True")
        if self._batches is None:
            self._skip()
        if not (batch := self._draw()):
            raise StopIteration
        self.position += 1
        self.checksum = fingerprint(batch[0])
        return batch[0]

    @property
    def replicated_state(self) -> bool:
        """True if the position counts global samples, and is therefore the same in all processes."""
        return self._global_batch_size is not None

    def get_state(self) -> dict[str, Any]:
        """Return the position, either in batches with the states that determine their order, or in global samples."""
        if self._global_batch_size is None:
            has_begun = self._batches is not None or self._restored
            return {"position": self.position, **(self._beginning() if has_begun else {})}
        epoch, batches = divmod(self.position, self._length()) if self._length() else (0, self.position)
        return {"epoch": epoch, "samples": batches * self._global_batch_size}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position when the next batch is requested."""
        self._restore(state)
        if "samples" in state:
            self.position = self._position_of(_position(state["epoch"]), _position(state["samples"]))
        else:
            self.position = _position(state["position"])
        self._batches = None

    def _position_of(self, epoch: int, samples: int) -> int:
        """Convert a position in global samples to a number of batches."""
        size = self._global_batch_size
        if size is None:
            raise StateError(
                f"the position was saved in samples of all processes ({samples} of epoch {epoch}): give skip_to the "
                "global_batch_size, the number of samples that all processes take in a step"
            )
        where = f"the position is {samples} samples after the start of epoch {epoch}"
        batches, rest = divmod(samples, size)
        if rest:
            raise StateError(
                f"{where}, which is no multiple of global_batch_size={size}: choose one that divides {samples}, or the "
                "one of the save"
            )
        length = self._length()
        if batches > length and length:
            raise StateError(
                f"{where}, and an epoch of this loader has {length} batches of {size}: give it the data of the save"
            )
        return epoch * length + batches

    def go_to_position(self) -> None:
        """Move to the position now if it is within an epoch; otherwise, move when the next batch is requested."""
        length = self._length()
        if self.position % length if length else self.position:
            self._skip()

    def _skip(self) -> None:
        length = self._length()
        epoch, taken = divmod(self.position, length) if length else self._restored.get(TAKEN, (0, self.position))
        self._go_to(epoch, taken)

    def _draw(self) -> list[Any]:
        if (batch := super()._draw()) or not self._taken:
            return batch
        self._begin(self.epoch + 1)
        return super()._draw()

    def _begin(self, epoch: int) -> None:
        loader = self._loader
        for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        super()._begin(epoch)


def skip_to(
    loader: Iterable[Any],
    n: int = 0,
    *,
    global_batch_size: int | None = None,
    generators: Sequence[Any] = (),
    state: tuple[Callable[[], Any], Callable[[Any], object]] | None = None,
) -> SkippedLoader:
    """Return an endless iterator over a plain loader's batches, epoch after epoch, with a position that can be saved.

    A resume skips completed epochs immediately if the loader has a length, and draws the earlier batches of the current
    epoch again. The order of these batches must be reproducible, so it may depend only on

    - the epoch, which is passed to ``set_epoch`` of the loader or its sampler, such as ``DistributedSampler``;
    - the states of random generators at the start of the epoch: the global generators of Python, numpy and torch, and
      the ``generator`` attributes of the loader, ``sampler``, ``batch_sampler`` and ``batch_sampler.sampler``. Pass all
      other generators, such as a transform's, in ``generators``;
    - the value that ``get`` in ``state`` returns at the start of the epoch, such as an epoch count or a JAX key.

    A warning is logged if the last batch before a stop differs when it is drawn again. With ``global_batch_size``, the
    order may depend only on the epoch.

    Args:
        loader: An iterable of batches, such as a ``DataLoader``, a list, or an object with ``__iter__``.
        n: The number of batches to skip, counted over all epochs; usually the number already taken by the run.
        global_batch_size: The number of samples that all processes together take in a step. Passing it declares that
            the processes share one global order and take the next samples from it at each step, as with
            ``DistributedSampler``. The position then counts samples in this order, and is valid for any number of
            processes. The batch size of each process must be ``global_batch_size`` divided by the number of processes.
            Pass ``drop_last`` to both the sampler and the loader. If the number of processes does not divide the number
            of samples, torch's sampler repeats samples at the end of an epoch, or drops some with ``drop_last``.
        generators: The Python, numpy and torch generators that the loader uses in this process. Their states
            at the start of the epoch are saved, and restored before the earlier batches are drawn again. Pass the
            same generators in the same order when the run is resumed.
        state: Two functions, ``get`` and ``set``. ``get()`` returns a value (plain data, arrays and tensors) on which
            the order of an epoch depends. It is called at the start of an epoch and at each step, and both values are
            saved. A resume passes the first to ``set`` before it draws earlier batches, and the second afterwards.

    Returns:
        The iterator. Callbacks and ``holdfast.graph`` save and restore it through ``get_state`` and ``set_state``.

    Raises:
        OptionError: The loader is an iterator, which cannot be restarted; or its batch size is not one process's share
            of ``global_batch_size``; or ``generators`` contains an object that is not a generator with a state; or
            ``state`` is not a pair of functions; or ``global_batch_size`` is combined with ``generators``, ``state`` or
            a loader that shuffles with a random generator.

    >>> batches = skip_to(["a", "b", "c"], 4)
    >>> next(batches), next(batches), next(batches), batches.position
    ('b', 'c', 'a', 7)

    For a loader that shuffles with its own generator and counts its epochs::

        batches = hf.skip_to(
            loader,
            generators=[loader.dataset.rng],
            state=(lambda: loader.epoch, lambda epoch: setattr(loader, "epoch", epoch)),
        )
    """
    return SkippedLoader(loader, _position(n), global_batch_size, generators, state)


def _check_loader(loader: Any, function: str, *, has_state: bool) -> None:
    """Raise OptionError for a loader that would yield different batches after a resume."""
    name = type(loader).__qualname__
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise OptionError(
            f"{function} needs a loader that can be restarted, such as a list or a DataLoader, not an iterator "
            f"({name}); an iterator with get_state and set_state needs no {function}"
        )
    if is_accelerate_loader(loader) and getattr(loader, "use_stateful_dataloader", False):
        raise OptionError(
            f"this {name} of accelerate was made with use_stateful_dataloader=True, and begins its first epoch before "
            "the first batch is requested, so that a resume would draw other random numbers: leave "
            "use_stateful_dataloader out"
        )
    held = vars(loader).items() if derives(loader, "DataLoader", "torch.") else ()
    kept = [key for key, value in held if key != "_iterator" and derives(value, "_BaseDataLoaderIter", "torch.")]
    workers: Any = getattr(loader, "num_workers", 0)
    if kept and (workers or generators_of(loader)):
        raise OptionError(
            f"this {name} keeps one iterator for all epochs ({', '.join(kept)}): its workers begin an epoch, and its "
            "generator draws for it, before the last epoch has ended, so that a resume would have other batches. Use a "
            "DataLoader, with persistent_workers=True if its workers are to stay"
        )
    is_counting = type(loader).__name__ == "_FabricDataLoader" and not has_state
    if is_counting and any(hasattr(sampler, "set_epoch") for sampler in samplers_of(loader)):
        raise OptionError(
            f"this {name} of Lightning's Fabric counts the epochs itself, and sets that of its sampler: after a "
            f"resume, it would count from 0 again. Pass the DataLoader that Fabric was given: {function}(loader), and "
            "fabric.to_device(batch)"
        )


def _check_handed(generators: Any, state: Any) -> None:
    """Raise OptionError unless ``generators`` is a sequence of generators and ``state`` a pair of functions or None."""
    if isinstance(generators, str | Mapping) or not isinstance(generators, Sequence):
        raise OptionError(f"generators={generators!r:.60} must be a sequence of generators, such as [rng]")
    for index, generator in enumerate(generators):
        if not is_generator(generator):
            raise OptionError(
                f"generators[{index}] is a {type(generator).__qualname__}, which is no generator: hand over objects "
                "such as np.random.default_rng(), random.Random() or torch.Generator(), and other state as "
                "state=(get, set)"
            )
        generator_state(generator)  # raises an error if the generator has no state
    is_pair = isinstance(state, tuple | list) and len(state) == 2 and all(map(callable, state))
    if state is not None and not is_pair:
        raise OptionError(
            f"state={state!r:.60} must be a pair of functions, (get, set): get() returns what the order of an epoch "
            "depends on, and set(value) takes it again"
        )


def fingerprint(batch: Any) -> int:
    """Return a checksum of the plain values in a batch and of sampled elements of its arrays in host memory."""
    checksum, left = 0, deque([batch])
    for _ in range(_MOST_VALUES):
        if not left:
            break
        with contextlib.suppress(Exception):  # batches may hold arbitrary objects, whose code may raise anything
            value = left.popleft()
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                value = value.flat[:: 1 + value.size // 64].tobytes()
            elif is_torch_tensor(value) and value.device.type == "cpu" and is_dense(value):
                torch: Any = loaded("torch")
                places = torch.arange(0, value.numel(), 1 + value.numel() // 64, device="cpu")
                value = value.detach().take(places).view(torch.uint8).numpy().tobytes()
            elif not is_leaf(value) and (contents := expand(value)) is not None:
                left.extend(islice(contents.values, _MOST_VALUES))
            if type(value) in PLAIN:
                checksum = zlib.crc32(value if type(value) is bytes else repr(value).encode(), checksum)
    return checksum


def _check_global(loader: Any, global_batch_size: int, *, hands_over: bool) -> None:
    """Raise OptionError if a single position cannot describe the loaders of all processes."""
    if hands_over:
        raise OptionError(
            "global_batch_size= makes the position one of all processes, and generators= and state= belong to one "
            "process: leave them out, and let set_epoch alone decide the order"
        )
    if (sampler := drawing_sampler(loader)) is not None:
        raise OptionError(
            f"global_batch_size= makes the position one of all processes, and this {type(loader).__qualname__} draws "
            f"its order from a random generator of each ({sampler}): use a sampler whose order depends on set_epoch "
            "alone, such as DistributedSampler"
        )
    if type(global_batch_size) is not int or global_batch_size < 1:
        raise OptionError(f"global_batch_size={global_batch_size!r} must be a number of samples, from 1")
    size = getattr(loader, "batch_size", None)
    count = getattr(getattr(loader, "sampler", None), "num_replicas", None)
    if type(size) is int and type(count) is int and size * count != global_batch_size:
        raise OptionError(
            f"global_batch_size={global_batch_size}, but the {type(loader).__qualname__} has batches of {size} in each "
            f"of {count} processes, which are {size * count}: give it batch_size={global_batch_size} // {count}, and "
            "choose a global_batch_size that the number of processes divides"
        )


def _position(value: Any) -> int:
    if not hasattr(value, "__index__") or value.__index__() < 0:
        raise OptionError(f"{value!r:.60} is not a number of batches")
    return int(value.__index__())


def without_generators(obj: object, state: Any) -> Any:
    """Return a :func:`state_of` result without the generator states that differ between processes."""
    if not isinstance(obj, LoaderPosition) or not isinstance(state, dict):
        return state
    # Each process draws its own worker seeds. Generators passed by the user are assumed to be the same everywhere.
    kept = {name: part for name, part in state.items() if name not in (_BEGUN, _NOW, LAST)}
    for part in state.keys() & {_BEGUN, _NOW}:
        if handed := {name: saved for name, saved in state[part].items() if name.startswith(_HANDED)}:
            kept[part] = handed
    return kept


def drawing_sampler(loader: Any) -> str | None:
    """Return the name of the sampler that draws the loader's order at random and has no restorable state, or None."""
    # Iterators of torchdata samplers have states, but torchdata's nodes do not save them.
    packages = ("torch.", "torchdata.") if nodes_of(loader) else "torch."
    for sampler in samplers_of(loader):
        if any(cls.__name__ in DRAWING and cls.__module__.startswith(packages) for cls in type(sampler).__mro__):
            return type(sampler).__name__
    return None


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the ``generator`` attributes of a loader and its samplers, keyed by name and without duplicates."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    generators = {f"{name}.generator": getattr(owner, "generator", None) for name, owner in owners.items()}
    return _each_once({name: generator for name, generator in generators.items() if is_generator(generator)})


def _each_once(generators: Mapping[str, Any], besides: Iterable[Any] = ()) -> dict[str, Any]:
    by_id = {id(generator): ("", generator) for generator in besides}
    for name, generator in generators.items():
        by_id.setdefault(id(generator), (name, generator))
    return {name: generator for name, generator in by_id.values() if name}


def _global_generators() -> list[Any]:
    """Return the global generators of Python, numpy and torch, which may also be attributes of a loader."""
    torch: Any = loaded("torch")
    of_torch = [] if torch is None else [torch.default_generator]
    return [getattr(random.random, "__self__", None), getattr(np.random.rand, "__self__", None), *of_torch]


def samplers_of(loader: Any) -> list[Any]:
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    of_nodes = [getattr(node, "sampler", None) for node in nodes_of(loader)]
    # torch's BatchSampler takes its order from the sampler that it wraps.
    return samplers + [
        getattr(sampler, "sampler", sampler) if type(sampler).__module__.startswith("torch.") else sampler
        for sampler in of_nodes
    ]


def warn_of_new_workers(loader: Any) -> None:
    _logger.warning(
        "a %s continues with new worker processes, whose random generators cannot be saved: each sample comes when "
        "it would have come, but where the dataset draws random numbers in the workers, as augmentation does, it "
        "draws others",
        type(loader).__qualname__,
    )

"""The states of data iterators, random generators, timers and other stateful objects.

An object is *stateful* if it has ``get_state``/``set_state`` (Grain iterators, ``torch.Generator``) or
``state_dict``/``load_state_dict`` (torch, torchdata), if it is an iterator with ``save(path)`` and ``restore(path)``
(CLU's iterators over tf.data), or if it is a random generator from NumPy or the standard library. A Ray actor handle is
stateful if the actor has these methods. ``hf.resumable`` and ``hf.skip_to`` make loaders stateful. :func:`state_of`
returns the state as a tree of containers, arrays and plain values, and :func:`restore_state` restores it from a tree
that was loaded without a template. :mod:`~holdfast.engine.pytree.codec` encodes and decodes the trees.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .errors import DamagedCheckpointError, OptionError, StateError, shortened
from .format import is_inside
from .generators import GlobalGenerators, generator_state, is_generator, set_generator_state
from .loaders import SkippedLoader, generators_of, is_torchdata_loader, nodes_of, samplers_of, warn_of_new_workers
from .pytree import decode_state, encode_plain, encode_state, is_plain, loaded

_logger = logging.getLogger("holdfast")

METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def is_stateful(obj: object) -> bool:
    """Return whether an object's state can be saved and then restored in place."""
    return is_generator(obj) or _methods(adapted(obj)) is not None or _writes_files(obj)


def is_stream(obj: object) -> bool:
    """Return whether an object's state differs between processes: true for data iterators, false for schedulers."""
    methods = _methods(adapted(obj))
    if methods is None:
        return is_generator(obj) or _writes_files(obj)
    # Grain iterators and torch.Generator have get_state. Schedulers and torchdata loaders both have state_dict,
    # but only the loaders are iterable.
    return methods == METHODS[0] or hasattr(type(obj), "__next__") or hasattr(type(obj), "__iter__")


def is_replicated(obj: object) -> bool:
    """Return whether an object declares its state to be the same for any number of processes."""
    # The state of an ``ElasticIterator`` is a position in the global order.
    return getattr(obj, "replicated_state", False) is True or is_elastic(obj)


def is_elastic(obj: object) -> bool:
    """Return whether an object is a Grain ``ElasticIterator``."""
    cls = type(obj)
    return cls.__module__.startswith("grain.") and cls.__name__ in ("ElasticIterator", "_ElasticMapDatasetIterator")


def state_of(obj: object) -> Any:
    obj = adapted(obj)
    if is_generator(obj):
        return encode_state(generator_state(obj))
    methods = _methods(obj)
    if methods is not None:
        if is_torchdata_loader(obj):
            return _state_of_loader(obj)
        return encode_state(getattr(obj, methods[0])())
    if _writes_files(obj):
        return _saved_files(obj)
    if not is_plain(obj):
        raise OptionError(
            f"{type(obj).__qualname__} has no state to save: define get_state() and set_state(state), or "
            "state_dict() and load_state_dict(state), or pass plain data"
        )
    return encode_plain(obj)


def begins_epoch(obj: object) -> bool:
    """Return whether restoring an object draws from torch's global generator, which must therefore be restored last."""
    cls = type(obj)
    is_iterable = hasattr(cls, "__iter__") and not hasattr(cls, "__next__")
    return isinstance(obj, SkippedLoader) or (is_iterable and _methods(obj) == METHODS[1])


Prepare = Callable[[Any, Any], Any]  # takes an object and its decoded state, and returns the state to set


def restore_state(obj: object, state: Any, prepare: Prepare = lambda _, state: state) -> Any:
    """Restore a state from :func:`state_of`. Return the object, or the saved value if the object is plain data."""
    if is_actor(obj):
        restore_state(adapted(obj), state)
        return obj
    if is_generator(obj):
        set_generator_state(obj, decode_state(state))
        return obj
    methods = _methods(obj)
    if is_torchdata_loader(obj):
        loader: Any = obj
        restore_loader(loader, state, prepare)
        if not any(hasattr(part, "set_epoch") for part in (loader.dataset, loader.batch_sampler, *samplers_of(loader))):
            loader.state_dict()  # makes the loader's iterator draw a seed now, before generators are restored
        return loader
    if methods is not None:
        try:
            decoded = decode_state(state)
        except StateError:
            encode_state(getattr(obj, methods[0])())  # lets decode_state find classes that are defined in functions
            decoded = decode_state(state)
        getattr(obj, methods[1])(prepare(obj, decoded))
        if isinstance(obj, SkippedLoader):
            obj.go_to_position()
        elif nodes_of(obj):
            warn_of_samplers(obj)
        return obj
    if _writes_files(obj):
        _restore_files(obj, state)
        return obj
    return decode_state(state)


def _methods(obj: object) -> tuple[str, str] | None:
    if isinstance(obj, type):
        return None
    for getter, setter in METHODS:
        methods = getattr(obj, getter, None), getattr(obj, setter, None)
        # A Ray actor handle has an attribute for each method, but only the attribute's .remote() can be called.
        if all(callable(method) and not hasattr(method, "remote") for method in methods):
            return getter, setter
    return None


# ---- Ray actors


_STILL_WAITING = 20.0  # seconds until the first warning about an unresponsive actor; doubled after each warning


class ActorState:
    """Gets and sets the state of a Ray actor through its methods; created by :func:`adapted`."""

    __remote__ = True  # marks the state as remote, so that the states of several actors are requested concurrently

    def __init__(self, handle: Any, methods: tuple[str, str]) -> None:
        self._handle = handle
        self._getter, self._setter = methods

    def get_state(self) -> Any:
        return answer_of_actor(self._handle, getattr(self._handle, self._getter).remote())

    def set_state(self, state: Any) -> None:
        answer_of_actor(self._handle, getattr(self._handle, self._setter).remote(state))

    def get_checkpointable_components(self) -> tuple[()]:
        return ()


_actors: WeakValueDictionary[Any, ActorState] = WeakValueDictionary()  # keyed by handle; handles of one actor are equal


def adapted(obj: object) -> Any:
    """Return the `ActorState` of a Ray actor that has state methods, or any other object unchanged."""
    if type(obj).__module__ != "ray.actor" or type(obj).__name__ != "ActorHandle":
        return obj
    for pair in METHODS:
        if all(hasattr(getattr(obj, name, None), "remote") for name in pair):
            return _actors.setdefault(obj, ActorState(obj, pair))
    return obj


def is_actor(obj: object) -> bool:
    """Return whether an object is a Ray actor handle with state methods."""
    return adapted(obj) is not obj


def answer_of_actor(handle: Any, reference: Any) -> Any:
    """Return the result of an actor call, logging warnings while the actor does not respond."""
    ray: Any = sys.modules["ray"]  # already imported, because a handle exists
    waited, pause = 0.0, _STILL_WAITING
    while not ray.wait([reference], timeout=pause)[0]:
        waited, pause = waited + pause, 2 * pause
        _logger.warning(
            "still waiting for the state of %r after %.0f s: the actor has not started, has not finished another call, "
            "or hangs",
            handle,
            waited,
        )
    return ray.get(reference)


# ---- iterators that write their state to files, such as CLU's iterators over tf.data

_FILES = "files"
_NAME = "iterator"  # name or name prefix of the files that the iterator writes


def _writes_files(obj: object) -> bool:
    cls = type(obj)
    return hasattr(cls, "__next__") and all(_takes_one(getattr(cls, name, None)) for name in ("save", "restore"))


def _takes_one(method: object) -> bool:
    """Return whether a method accepts one argument, such as a path; a ``save`` that returns the state does not."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None, "path")
    except (TypeError, ValueError):  # ValueError is raised for C methods without a signature
        return False
    return True


def _saved_files(obj: Any) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        obj.save(f"{folder}/{_NAME}")
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): np.frombuffer(path.read_bytes(), np.uint8) for path in paths}
    if not files:
        raise StateError(f"{type(obj).__qualname__}.save(path) wrote no file at the path or beside it")
    return {_FILES: files}


def _restore_files(obj: Any, state: Any) -> None:
    files = state.get(_FILES) if isinstance(state, dict) else None
    if not isinstance(files, dict) or not all(name.partition("/")[0].startswith(_NAME) for name in files):
        raise DamagedCheckpointError(
            f"{type(obj).__qualname__}: expected the files of an iterator, found {state!r:.80}"
        )
    import tempfile

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        for name, content in files.items():
            if not is_inside(name):
                raise DamagedCheckpointError(f"{type(obj).__qualname__}: {name!r} is not the name of a file")
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.asarray(content, np.uint8).tobytes())
        obj.restore(f"{folder}/{_NAME}")


# ---- torchdata's StatefulDataLoader

_OWN_STATE, _GENERATORS = "holdfast.loader", "holdfast.generators"
_FINISHED = "_iterator_finished"  # key in a loader's state; its value is true if the next iterator begins an epoch
_KNOWN_ORDER = ("SequentialSampler", "DistributedSampler", "_InfiniteConstantSampler")  # samplers that need no state


class _LoaderState(dict[str, Any]):
    """A restored state from which a torchdata loader starts its next iterator."""

    # A new iterator and its sampler draw a seed and an order that the saved run had already drawn. Therefore, the
    # generators are reset only when the iterator reads the last key of the state, after the program has set the epoch.

    def __init__(self, state: Any, saved: Any, begun: Callable[[], object]) -> None:
        super().__init__(state)
        self.saved = saved  # the state from the checkpoint; saves store it unchanged until an iterator has started
        self.has_reported = False  # whether a step has been reported since the restore
        self._begun: Callable[[], object] | None = begun

    def __getitem__(self, key: str) -> Any:
        if key == _FINISHED and self._begun is not None:
            # Drop the callback: it and the loader form a cycle that would keep workers alive until garbage collection.
            begun, self._begun = self._begun, None
            begun()
        return super().__getitem__(key)


def _state_of_loader(loader: Any) -> Any:
    """Return the states of a loader and of its generators, because torchdata does not save the seeds of epochs."""
    if isinstance(restored := loader.next_iter_state, _LoaderState):
        restored.has_reported = True
        return restored.saved
    generators = generators_of(loader)
    state = encode_state(loader.state_dict())
    return {_OWN_STATE: state, _GENERATORS: {name: state_of(generator) for name, generator in generators.items()}}


def restore_loader(
    loader: Any,
    state: Any,
    prepare: Prepare = lambda _, state: state,
    global_generators: GlobalGenerators | None = None,
) -> str:
    """Restore the position of a torchdata loader. Return a note for users about the next loop, or ""."""
    # The next loop resets the global generators when it starts, unless a step has been reported by then.
    loader_state, generators = state, {}
    if isinstance(state, dict) and state.keys() == {_OWN_STATE, _GENERATORS}:  # earlier versions saved no generators
        loader_state, generators = state[_OWN_STATE], state[_GENERATORS]
    decoded = loaded_state(loader, decode_state(loader_state))
    given, length = 0 if decoded.get(_FINISHED) else _yielded(decoded), _length(loader)
    ended = given == length != 0
    # A sampler with a state restores its generator itself, for example to draw its order again.
    if has_states := any(map(_methods, samplers_of(loader))):
        generators = {name: saved for name, saved in generators.items() if "sampler." not in name}
    current = generators_of(loader)
    if unknown := generators.keys() - current.keys():  # an earlier version may have detected more generators
        _logger.warning(
            "a %s was saved with generators that it does not show, and that stay as the program has set them: %s. If "
            "its batches depend on them, pass them as extras beside it, such as rng=dataset.rng",
            type(loader).__qualname__,
            shortened(sorted(unknown)),
        )

    def begun() -> None:
        if ended and has_states:  # exhaust the sampler; otherwise, the next epoch would start where the last one ended
            deque(islice(iter(loader.sampler), loader.batch_size or 1), 0)
        for name in current.keys() & generators.keys():
            restore_state(current[name], generators[name])
        if global_generators is not None and not restored.has_reported:
            global_generators.set_back()

    restored = _LoaderState(prepare(loader, {**decoded, _FINISHED: True} if ended else decoded), state, begun)
    load_unwrapped(loader, restored)
    if ended:
        return "had come to the end of an epoch: the next loop over it begins a new one"
    if given and length is None:
        return "reads an iterable dataset: if it had given its last batch, the next loop over it yields nothing"
    return ""


def loaded_state(loader: Any, state: Any) -> dict[str, Any]:
    """Load a state into a torchdata loader, and warn; return torchdata's part of it, which a subclass may wrap."""
    loader.load_state_dict(state)
    own: dict[str, Any] = loader.next_iter_state or {}  # empty if the class sets its position in another way
    _warn_of_lost_draws(loader, own)
    return own


def load_unwrapped(loader: Any, state: Mapping[str, Any]) -> None:
    """Load a state of torchdata into a loader, without the methods of a subclass."""
    kind: Any = next(cls for cls in type(loader).__mro__ if cls.__module__.startswith("torchdata."))
    kind.load_state_dict(loader, state)


def _yielded(state: Mapping[str, Any]) -> int:
    """Return how many batches of the current epoch a torchdata loader has yielded."""
    if "_snapshot" not in state:
        return int(state.get("_num_yielded", 0))
    return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])


def _length(loader: Any) -> int | None:
    """Return the number of batches in an epoch, or None for an iterable dataset, whose length is only an estimate."""
    torch: Any = loaded("torch")
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:  # the sampler has no length
        return None


def _warn_of_lost_draws(loader: Any, state: Mapping[str, Any]) -> None:
    """Warn about random numbers that will differ if a torchdata loader continues within an epoch."""
    ended = state.get(_FINISHED) or _yielded(state) in (0, _length(loader))
    if loader.num_workers and (not ended or loader.persistent_workers):
        warn_of_new_workers(loader)
    if not ended:
        warn_of_samplers(loader)


def warn_of_samplers(loader: Any) -> None:
    """Warn about a sampler without a state, whose order may differ after a resume within an epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    is_torchs = type(batch_sampler).__module__.startswith(("torch.", "torchdata."))
    for sampler in [*samplers_of(loader), *([] if is_torchs else [batch_sampler])]:
        kinds = {cls.__name__ for cls in type(sampler).__mro__}
        is_known = type(sampler).__module__.startswith("torchdata.") and is_torchdata_loader(loader)
        if not (sampler is None or is_known or kinds & set(_KNOWN_ORDER) or _methods(sampler)):
            _logger.warning(
                "the %s of a %s has no state_dict and load_state_dict: its order is exact only if it is the same each "
                "time, or depends on set_epoch alone; hf.resumable of a DataLoader draws it again, from generators too",
                type(sampler).__qualname__,
                type(loader).__qualname__,
            )
            return


def check_grain_loader(name: str, obj: object, *, is_fresh: bool) -> None:
    """Warn if operations of a Grain ``DataLoader`` may buffer records; raise OptionError if no resume can succeed."""
    if type(obj).__name__ != "DataLoaderIterator" or not _is_of_grain(type(obj)):
        return
    # A DataLoader compares the repr of its source and of its sampler with those in the state that it is to restore.
    if is_fresh and (found := re.search(r"<(?:[\w<>]+\.)*(\w+) object at 0x[0-9a-f]+>", str(state_of(obj)))):
        raise OptionError(
            f"{name}= is an iterator of a DataLoader of Grain, which refuses a resume unless the repr of its source "
            f"and sampler is the same, and {found[0]} has an address, which differs in each process. Give {found[1]} a "
            f"__repr__ without an address, such as: def __repr__(self): return {found[1]!r}"
        )
    operations = getattr(getattr(obj, "_data_loader", None), "_operations", ())
    custom = [operation for operation in operations if not any(map(_is_of_grain, type(operation).__mro__))]
    if custom:
        _logger.warning(
            "%s= applies operations of the program to whole iterators: %s. A DataLoader of Grain does not save what "
            "such an operation holds from one record to the next, as packing does, so that a resume loses it; the "
            "packing of grain.MapDataset and grain.IterDataset is exact",
            name,
            ", ".join(type(operation).__qualname__ for operation in custom),
        )


def check_window(name: str, obj: object) -> None:
    """Raise OptionError for a Grain window shuffle that would change the order of later windows after a resume.

    See https://github.com/google/grain/issues/1178, which is fixed in Grain 0.2.16.
    """
    if not _is_of_grain(type(obj)) or getattr(sys.modules.get("grain"), "__version_info__", (0,)) >= (0, 2, 16):
        return
    open_ = [obj.get_state()] if hasattr(obj, "get_state") else []
    for state in open_:
        if isinstance(state, dict) and "window_index" in state:
            version = getattr(sys.modules.get("grain"), "__version__", "before 0.2.16")
            raise OptionError(
                f"{name}= shuffles a window of Grain {version}, which shuffles later windows in another order after a "
                "resume: install grain 0.2.16 or newer, or shuffle the whole dataset with grain.MapDataset.shuffle"
            )
        open_ += state.values() if isinstance(state, dict) else state if isinstance(state, list) else []


def _is_of_grain(cls: type) -> bool:
    # Ignore Grain's protocol `Operation`, because user-defined operations also derive from it.
    return cls.__module__.startswith("grain.") and cls.__name__ != "Operation"

"""Fingerprints of the objects that determine a program's next steps: random generators, iterators and other values.

A rehearsal takes fingerprints at every step of an uninterrupted run and of an interrupted run. If an object's
fingerprints at a step differ between the two runs, the object was not restored. The search starts from the variables of
running functions and of the program's own modules. It uses only accessors that do not change the program.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import operator
import os
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from .generators import as_tree, capture, checksums, is_generator
from .loaders import DRAWING
from .pytree import is_torch_tensor, loaded
from .stateful import METHODS, state_of

Kind = Literal["generator", "position", "loader", "optimizer", "value", "array"]
STATELESS = "no state"  # digest of a generator without a state, which draws random numbers from the operating system


class Fact(NamedTuple):
    """The fingerprint of one object in the program."""

    kind: Kind
    type: str
    where: str  # function or module through which the object was found
    digest: str  # digest of the object's state


_Space = tuple[str, str, dict[str, Any]]  # (name prefix, function or module, variables)

_OBJECTS = 5000  # maximum number of objects to visit per step, separately for functions and modules
_SECONDS = 0.5  # maximum processor time in seconds per step, separately for functions and modules
_DEPTH = 7
_ITEMS = 64  # maximum number of items to visit per container
_BYTES = 4 << 20  # maximum size in bytes of an array to hash
_TEXT = 200  # maximum length in characters of a string that counts as a value
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        str(Path(__file__).parents[1]),  # holdfast itself
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_LAZY = (zip, map, filter, enumerate, reversed, itertools.chain, itertools.cycle, itertools.islice)
_OPEN = ("torch.utils.data", "torchdata", "grain", "datasets", "flax.nnx.rnglib")  # search objects of these libraries
_ITERATORS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")  # torch's DataLoader iterators
_CLOSED = (type, ModuleType, FunctionType, FrameType)


class Fingerprints:
    """Takes fingerprints at each step, and determines which fingerprints have changed since the previous step."""

    def __init__(self) -> None:
        self._last: dict[str, Fact] = {}

    def changes(self) -> dict[str, Fact | None]:
        """Return the facts that are new or changed since the last call, and None for objects that no longer exist."""
        now = facts()
        changed: dict[str, Fact | None] = {name: fact for name, fact in now.items() if self._last.get(name) != fact}
        changed |= dict.fromkeys(self._last.keys() - now.keys())
        self._last = now
        return changed


def facts() -> dict[str, Fact]:
    """Return the fingerprints of all objects that are reachable from running functions and modules, keyed by name."""
    by_name = dict(_global_generators())
    # Search functions and modules separately, because the variables of many modules would exhaust a shared limit.
    groups = [list(_functions()), list(_modules())]
    visited = {id(space) for group in groups for _, _, space in group}
    looked: list[tuple[str, Any]] = []  # references that keep objects alive, so that ids are not reused
    for group in groups:
        _look(group, by_name, visited, looked)
    ours = [obj for _, obj in looked if type(obj).__module__.startswith(f"{__package__.partition('.')[0]}.")]
    handed = {id(part) for obj in ours for _, part in _attributes(obj)}  # held by holdfast, for example by skip_to
    for name, obj in looked:
        if id(obj) in handed and name in by_name and by_name[name].kind == "loader":
            del by_name[name]
    if not any(fact.kind == "loader" for fact in by_name.values()):  # a for loop may hold a loader's only reference
        kinds = {getattr(sys.modules.get("torch.utils.data.dataloader"), name, None) for name in _ITERATORS}
        objects = gc.get_objects()
        running = itertools.compress(objects, map(kinds.__contains__, map(type, objects)))
        orders = [getattr(obj._index_sampler, "sampler", None) for obj in running if id(obj) not in handed]
        if any(type(order).__name__ in DRAWING for order in orders):
            by_name["loader = DataLoader(...)"] = Fact("loader", "DataLoader", "", "shuffled")
    return by_name


def not_handed_over() -> list[str]:
    """Describe each reachable generator and iterator that has a state, except the global generators."""
    return [
        f"{name} ({fact.type}; {fact.where})"
        for name, fact in facts().items()
        if fact.kind in ("generator", "position") and fact.where and fact.digest != STATELESS
    ]


def _look(spaces: list[_Space], by_name: dict[str, Fact], visited: set[int], looked: list[tuple[str, Any]]) -> None:
    """Add the fingerprints of objects that are reachable from the variables in ``spaces``, breadth first."""
    queue: deque[tuple[str, str, Any, int, type]] = deque()  # name, function or module, object, depth, owner's type
    for prefix, where, space in spaces:
        named = ((name, value) for name, value in space.items() if isinstance(name, str) and name[:2] != "__")
        queue.extend((f"{prefix}{name}", where, value, 0, dict) for name, value in named)
    until = time.thread_time() + _SECONDS
    for _ in range(_OBJECTS):
        if not queue or time.thread_time() > until:
            break
        name, where, obj, depth, owner = queue.popleft()
        try:
            if not isinstance(obj, bool | int | float | str):
                if id(obj) in visited:
                    continue
                visited.add(id(obj))
                looked.append((name, obj))
            fact = _fact(obj, with_arrays=depth < 2)
            if fact is not None and fact[0] == "value" and _is_position(owner):
                by_name.setdefault(name, Fact("position", owner.__qualname__, where, fact[1]))
            elif fact is not None:
                by_name.setdefault(name, Fact(fact[0], type(obj).__qualname__, where, fact[1]))
            if depth < _DEPTH:
                queue.extend((f"{name}{key}", where, part, depth + 1, type(obj)) for key, part in _parts(obj))
        except Exception:  # accessing an object may raise anything, for example if an array's buffer was donated
            continue


# ---- the variables to search


def _functions() -> Iterator[_Space]:
    """Yield the variables of the program's functions on this thread's stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if _is_own(code.co_filename) and code.co_name != "<module>":
            yield "", f"{os.path.basename(code.co_filename)}, in {code.co_qualname}", dict(frame.f_locals)
        elif _is_trainer(trainer := frame.f_locals.get("self")):  # a trainer holds the program's module and data
            yield "", "the trainer", {"trainer": trainer}
        frame = frame.f_back


def _modules() -> Iterator[_Space]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and _is_own(file):
            yield "" if name == "__main__" else f"{name}.", os.path.basename(file), dict(vars(module))
        elif name == "__main__" and file is None:  # a program passed with python -c
            yield "", "the program", dict(vars(module))


@cache  # called for every module at every step
def _is_own(file: str) -> bool:
    path = os.path.abspath(file)
    return not (file.startswith("<frozen") or path.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in path)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object refers to, each with a name suffix."""
    if isinstance(obj, dict):
        for key, value in itertools.islice(list(obj.items()), _ITEMS):
            yield f"[{key!r:.40}]", value
    elif isinstance(obj, list | tuple | deque):
        for index, value in enumerate(itertools.islice(list(obj), _ITEMS)):
            yield f"[{index}]", value
    elif isinstance(obj, GeneratorType):
        if obj.gi_frame is not None:
            for name, value in dict(obj.gi_frame.f_locals).items():
                yield f".{name}", value
    elif isinstance(obj, _LAZY):
        for index, value in enumerate(gc.get_referents(obj)):
            yield f".{index}", value
    elif isinstance(obj, MethodType):
        yield "", obj.__self__
    elif _is_trainer(obj):
        for name in ("lightning_module", "datamodule", "train_dataloader"):
            yield f".{name}", getattr(obj, name, None)
    elif not isinstance(obj, _CLOSED) and _is_open(type(obj)):
        for name, value in list(_attributes(obj)):
            if not name.startswith("__"):
                yield f".{name}", value


def _is_open(cls: type) -> bool:
    """Return whether a class belongs to the program or a data library, in which case its instances are searched."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    is_own = cls.__module__ == "__main__" or (isinstance(file, str) and _is_own(file))
    return is_own or cls.__module__.startswith(_OPEN)


def _is_trainer(obj: object) -> bool:
    cls = type(obj)
    return cls.__name__ == "Trainer" and cls.__module__.startswith(("lightning.", "pytorch_lightning."))


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    variables = getattr(obj, "__dict__", None)
    if isinstance(variables, dict):
        yield from variables.items()
    for cls in type(obj).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(descriptor := vars(cls).get(name), MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # the slot is unset
                    yield name, descriptor.__get__(obj, cls)


# ---- kinds and digests of objects


def _fact(obj: Any, *, with_arrays: bool) -> tuple[Kind, str] | None:
    """Return the kind of an object and a digest of its state, or None if the object has no state."""
    if isinstance(obj, bool | int | float) or (isinstance(obj, str) and len(obj) <= _TEXT):
        return "value", repr(obj)
    if isinstance(obj, random.SystemRandom):
        return "generator", STATELESS
    if is_generator(obj):
        return "generator", _digest(state_of(obj))
    if isinstance(obj, np.number | np.bool_):
        return "value", repr(obj.item())
    if isinstance(obj, np.ndarray):
        if obj.ndim == 0 and obj.dtype.kind in "biufc":
            return "value", repr(obj.item())
        small = with_arrays and 0 < obj.nbytes <= _BYTES and obj.dtype != object
        return ("array", _digest(obj)) if small else None
    torch, jax = loaded("torch"), loaded("jax")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _fact_of_torch(torch, obj) if with_arrays else None
    if torch is not None and type(obj) is torch.utils.data.DataLoader:
        return ("loader", "shuffled") if type(obj.sampler).__name__ in DRAWING else None
    if torch is not None and isinstance(obj, torch.optim.Optimizer):
        first: Any = next(iter(obj.state.values()), {}).values()
        facts = [_fact_of_torch(torch, value) if is_torch_tensor(value) else repr(value) for value in first]
        return "optimizer", _digest(*facts)
    if jax is not None and isinstance(obj, jax.Array):
        return _fact_of_jax(jax, obj, with_arrays=with_arrays)
    if type(obj).__name__ == "RngStream" and type(obj).__module__.startswith("flax."):
        count = getattr(obj.count, "_raw_value", obj.count)  # only the count changes; the key is constant
        return "generator", str(int(count))
    if isinstance(obj, GeneratorType):
        return "position", str(-2 if obj.gi_frame is None else obj.gi_frame.f_lasti)
    if hasattr(type(obj), "__next__"):
        hint = operator.length_hint(obj, -1) if type(obj).__module__ == "builtins" else -1
        return "position", f"{hint} left" if hint >= 0 else ""
    return None


def _fact_of_torch(torch: Any, tensor: Any) -> tuple[Kind, str] | None:
    if tensor.device.type == "meta" or not 0 < tensor.numel() * tensor.element_size() <= _BYTES:
        return None
    if tensor.ndim == 0:
        return "value", repr(tensor.item())
    return "array", _digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _fact_of_jax(jax: Any, array: Any, *, with_arrays: bool) -> tuple[Kind, str] | None:
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return "generator", _digest(np.asarray(jax.random.key_data(array)))
    is_key = array.dtype == np.uint32 and array.shape in ((2,), (4,))  # a legacy JAX key
    if not (is_key or (with_arrays and 0 < array.nbytes <= _BYTES)):
        return None
    if array.ndim == 0:
        return "value", repr(array.item())  # a number, such as a moving average, may be a weakly typed scalar array
    return "generator" if is_key else "array", _digest(np.asarray(array))


def _is_position(cls: type) -> bool:
    """Return whether instances of a class may store a position in the data in ordinary attributes."""
    names = {base.__name__ for base in cls.__mro__}
    if names & {"Module", "Optimizer", "LightningDataModule"}:  # their base classes have many attributes
        return False
    has_state = any(hasattr(cls, get) and hasattr(cls, set_) for get, set_ in METHODS)
    return has_state or hasattr(cls, "__next__") or bool(names & {"Dataset", "Sampler", "IterableDataset"})


_GLOBAL = {"python": "the random module", "numpy": "numpy.random", "torch": "torch's default generator"}


def _global_generators() -> Iterator[tuple[str, Fact]]:
    for name, state in as_tree(capture()).items():
        label = _GLOBAL.get(name, f"torch's generators of {name.upper()}")
        yield label, Fact("generator", name, "", _digest(state))


def _digest(*parts: Any) -> str:
    return f"{checksums({'': parts})['']:08x}"

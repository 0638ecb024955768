"""Fingerprints of what a program's next steps depend on: random generators, iterators, and other values in reach.

A rehearsal takes them at every step of an undisturbed run and of an interrupted one. An object that differs between the
two at the same step was not restored. Objects are found by their names, from the variables of the functions that are
running and of the program's own modules. Only side-effect-free accessors are called, so that fingerprints do not change
the program.
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
STATELESS = "no state"  # the digest of a generator of the operating system: no look tells what was drawn from it


class Fact(NamedTuple):
    """The fingerprint of one object of the program."""

    kind: Kind
    type: str
    where: str  # the place where it was found
    digest: str  # the digest of its state


_Space = tuple[str, str, dict[str, Any]]  # (prefix of the names, place in the program, variables)

_OBJECTS = 5000  # maximum number of objects to visit at a step: in functions, and again in modules
_SECONDS = 0.5  # maximum number of seconds for each of them
_DEPTH = 7
_ITEMS = 64  # maximum number of items to visit in a container
_BYTES = 4 << 20  # maximum number of bytes to hash of an array
_TEXT = 200  # characters
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        str(Path(__file__).parents[1]),  # holdfast
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_LAZY = (zip, map, filter, enumerate, reversed, itertools.chain, itertools.cycle, itertools.islice)
_OPEN = ("torch.utils.data", "torchdata", "grain", "datasets", "flax.nnx.rnglib")  # libraries whose objects are visited
_ITERATORS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")  # of torch's DataLoader
_CLOSED = (type, ModuleType, FunctionType, FrameType)


class Fingerprints:
    """Takes fingerprints at step after step, and returns the changes."""

    def __init__(self) -> None:
        self._last: dict[str, Fact] = {}

    def changes(self) -> dict[str, Fact | None]:
        """Return the facts that are new or differ from the last call; None for those that are gone."""
        now = facts()
        changed: dict[str, Fact | None] = {name: fact for name, fact in now.items() if self._last.get(name) != fact}
        changed |= dict.fromkeys(self._last.keys() - now.keys())
        self._last = now
        return changed


def facts() -> dict[str, Fact]:
    """Return the fingerprints of all objects that the running functions and modules reach, by name."""
    found = dict(_global_generators())
    # A program has many modules, whose variables must not hide what the running functions hold.
    groups = [list(_functions()), list(_modules())]
    known = {id(space) for group in groups for _, _, space in group}
    looked: list[tuple[str, Any]] = []  # References keep the objects alive, so that no other object gets the same id.
    for group in groups:
        _look(group, found, known, looked)
    ours = [one for _, one in looked if type(one).__module__.startswith(f"{__package__.partition('.')[0]}.")]
    handed = {id(part) for one in ours for _, part in _attributes(one)}  # such as the loader of hf.skip_to
    for name in [name for name, thing in looked if id(thing) in handed and name in found]:
        if found[name].kind == "loader":
            del found[name]
    if not any(fact.kind == "loader" for fact in found.values()):  # Perhaps a for statement alone holds one.
        kinds = {getattr(sys.modules.get("torch.utils.data.dataloader"), name, None) for name in _ITERATORS}
        objects = gc.get_objects()
        running = itertools.compress(objects, map(kinds.__contains__, map(type, objects)))
        orders = [getattr(one._index_sampler, "sampler", None) for one in running if id(one) not in handed]
        if any(type(order).__name__ in DRAWING for order in orders):
            found["loader = DataLoader(...)"] = Fact("loader", "DataLoader", "", "shuffled")
    return found


def not_handed_over() -> list[str]:
    """Describe the generators and iterators in reach, except the global generators."""
    return [
        f"{name} ({fact.type}; {fact.where})"
        for name, fact in facts().items()
        if fact.kind in ("generator", "position") and fact.where and fact.digest != STATELESS
    ]


def _look(spaces: list[_Space], found: dict[str, Fact], known: set[int], looked: list[tuple[str, Any]]) -> None:
    """Add the fingerprints of the objects that variables refer to, the nearest first."""
    queue: deque[tuple[str, str, Any, int, type]] = deque()  # name, place, object, depth, type of its owner
    for prefix, where, space in spaces:
        named = ((name, value) for name, value in space.items() if isinstance(name, str) and name[:2] != "__")
        queue.extend((f"{prefix}{name}", where, value, 0, dict) for name, value in named)
    until = time.monotonic() + _SECONDS
    for _ in range(_OBJECTS):
        if not queue or time.monotonic() > until:
            break
        name, where, thing, depth, owner = queue.popleft()
        try:
            if not isinstance(thing, bool | int | float | str):
                if id(thing) in known:
                    continue
                known.add(id(thing))
                looked.append((name, thing))
            fact = _fact(thing, with_arrays=depth < 2)
            if fact is not None and fact[0] == "value" and _is_position(owner):
                found.setdefault(name, Fact("position", owner.__qualname__, where, fact[1]))
            elif fact is not None:
                found.setdefault(name, Fact(fact[0], type(thing).__qualname__, where, fact[1]))
            if depth < _DEPTH:
                kind = type(thing)
                queue.extend((f"{name}{key}", where, part, depth + 1, kind) for key, part in _parts(thing))
        except Exception:  # An object's own code may fail, such as that of an array whose memory was donated.
            continue


# ---- the variables to search


def _functions() -> Iterator[_Space]:
    """Generate the variables of the program's functions on the stack of this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if _is_own(code.co_filename) and code.co_name != "<module>":
            place = f"{os.path.basename(code.co_filename)}, in {code.co_qualname}"
            yield "", place, dict(frame.f_locals)
        elif _is_trainer(trainer := frame.f_locals.get("self")):  # A trainer holds the program's module and data.
            yield "", "the trainer", {"trainer": trainer}
        frame = frame.f_back


def _modules() -> Iterator[_Space]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and _is_own(file):
            yield "" if name == "__main__" else f"{name}.", os.path.basename(file), dict(vars(module))
        elif name == "__main__" and file is None:  # python -c
            yield "", "the program", dict(vars(module))


@cache  # called for every module at every step
def _is_own(file: str) -> bool:
    path = os.path.abspath(file)
    return not (file.startswith("<frozen") or path.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in path)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Generate the parts of an object, each with the suffix of its name."""
    if isinstance(thing, dict):
        for key, value in itertools.islice(list(thing.items()), _ITEMS):
            yield f"[{key!r:.40}]", value
    elif isinstance(thing, list | tuple | deque):
        for index, value in enumerate(itertools.islice(list(thing), _ITEMS)):
            yield f"[{index}]", value
    elif isinstance(thing, GeneratorType):
        if thing.gi_frame is not None:
            for name, value in dict(thing.gi_frame.f_locals).items():
                yield f".{name}", value
    elif isinstance(thing, _LAZY):
        for index, value in enumerate(gc.get_referents(thing)):
            yield f".{index}", value
    elif isinstance(thing, MethodType):
        yield "", thing.__self__
    elif _is_trainer(thing):
        for name in ("lightning_module", "datamodule", "train_dataloader"):
            yield f".{name}", getattr(thing, name, None)
    elif not isinstance(thing, _CLOSED) and _is_open(type(thing)):
        for name, value in list(_attributes(thing)):
            if not name.startswith("__"):
                yield f".{name}", value


def _is_open(kind: type) -> bool:
    """Return whether to visit the attributes of a class: one of the program, or a data loader."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__.startswith(_OPEN):
        return True
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (isinstance(file, str) and _is_own(file))


def _is_trainer(thing: object) -> bool:
    kind = type(thing)
    return kind.__name__ == "Trainer" and kind.__module__.startswith(("lightning.", "pytorch_lightning."))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict):
        yield from own.items()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(descriptor := vars(kind).get(name), MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # The slot is not set.
                    yield name, descriptor.__get__(thing, kind)


# ---- what an object is


def _fact(thing: Any, *, with_arrays: bool) -> tuple[Kind, str] | None:
    """Return the kind of an object and a digest of its state; None if it has no state."""
    if isinstance(thing, bool | int | float) or (isinstance(thing, str) and len(thing) <= _TEXT):
        return "value", repr(thing)
    if isinstance(thing, random.SystemRandom):
        return "generator", STATELESS
    if is_generator(thing):
        return "generator", _digest(state_of(thing))
    if isinstance(thing, np.number | np.bool_):
        return "value", repr(thing.item())
    if isinstance(thing, np.ndarray):
        if thing.ndim == 0 and thing.dtype.kind in "biufc":
            return "value", repr(thing.item())
        small = with_arrays and 0 < thing.nbytes <= _BYTES and thing.dtype != object
        return ("array", _digest(thing)) if small else None
    torch, jax = loaded("torch"), loaded("jax")
    if torch is not None and isinstance(thing, torch.Tensor):
        return _fact_of_torch(torch, thing) if with_arrays else None
    if torch is not None and type(thing) is torch.utils.data.DataLoader:
        return ("loader", "shuffled") if type(thing.sampler).__name__ in DRAWING else None
    if torch is not None and isinstance(thing, torch.optim.Optimizer):
        first: Any = next(iter(thing.state.values()), {}).values()
        facts = [_fact_of_torch(torch, one) if is_torch_tensor(one) else repr(one) for one in first]
        return "optimizer", _digest(*facts)
    if jax is not None and isinstance(thing, jax.Array):
        return _fact_of_jax(jax, thing, with_arrays=with_arrays)
    if type(thing).__name__ == "RngStream" and type(thing).__module__.startswith("flax."):
        count = getattr(thing.count, "_raw_value", thing.count)  # the key stays the same
        return "generator", str(int(count))
    if isinstance(thing, GeneratorType):
        last = -2 if thing.gi_frame is None else thing.gi_frame.f_lasti
        return "position", str(last)
    if hasattr(type(thing), "__next__"):
        hint = operator.length_hint(thing, -1) if type(thing).__module__ == "builtins" else -1
        return "position", f"{hint} left" if hint >= 0 else ""
    return None


def _fact_of_torch(torch: Any, tensor: Any) -> tuple[Kind, str] | None:
    if tensor.device.type == "meta" or not 0 < tensor.numel() * tensor.element_size() <= _BYTES:
        return None
    if tensor.ndim == 0:
        return "value", repr(tensor.item())
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return "array", _digest(bits.numpy())


def _fact_of_jax(jax: Any, array: Any, *, with_arrays: bool) -> tuple[Kind, str] | None:
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return "generator", _digest(np.asarray(jax.random.key_data(array)))
    is_key = array.dtype == np.uint32 and array.shape in ((2,), (4,))  # a key of the legacy kind
    if not (is_key or (with_arrays and 0 < array.nbytes <= _BYTES)):
        return None
    if array.ndim == 0:
        return "value", repr(array.item())  # A moving average may be such a number, weakly typed.
    return "generator" if is_key else "array", _digest(np.asarray(array))


def _is_position(kind: type) -> bool:
    """Return whether plain attributes of a class hold a position in data."""
    names = {one.__name__ for one in kind.__mro__}
    if names & {"Module", "Optimizer"}:
        return False
    has_state = any(hasattr(kind, get) and hasattr(kind, set_) for get, set_ in METHODS)
    return has_state or hasattr(kind, "__next__") or bool(names & {"Dataset", "Sampler", "IterableDataset"})


_GLOBAL = {"python": "the random module", "numpy": "numpy.random", "torch": "torch's default generator"}


def _global_generators() -> Iterator[tuple[str, Fact]]:
    """Generate the generators that functions such as ``random.random()`` draw from."""
    for name, state in as_tree(capture()).items():
        known = _GLOBAL.get(name, f"torch's generators of {name.upper()}")
        yield known, Fact("generator", name, "", _digest(state))


def _digest(*parts: Any) -> str:
    return f"{checksums({'': parts})['']:08x}"

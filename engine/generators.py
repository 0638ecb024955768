"""The states of random generators: the global generators of Python, numpy and torch, and individual generators.

Torch's generators are ignored if the program has not imported torch. JAX has no global generators.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedCheckpointError, OptionError, shortened
from .pytree import flatten, is_jax_array, is_key, is_torch_tensor, leaves_of, loaded

DRAWN, IDLE = "drawn", "idle"
"""Keys of a saved state: ``DRAWN`` for the generators that steps have drawn from, and ``IDLE`` for all others.

An idle generator may be unseeded, so its state may differ between runs of the same program.
"""

_SEEDS = "seed_seq"  # key of a numpy Generator's seed sequence, saved only if the Generator has spawned others
_DEVICES = ("cuda", "xpu")  # torch device types that have a default generator per device
_PLAIN = {bool, int, float, str, bytes, type(None)}
_EXACT = {int, str, bytes}
_has_mps = cache(lambda torch: bool(torch.backends.mps.is_available()))


def capture() -> dict[str, Any]:
    """Return the states of the global generators, keyed by name, in the form that is cheapest to copy."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    torch: Any = loaded("torch")
    if torch is None:
        return states
    states["torch"] = torch.get_rng_state()
    for name in _DEVICES:
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            states[name] = [generator.get_state() for generator in device.default_generators]
    if _has_mps(torch):
        states["mps"] = torch.mps.get_rng_state()
    return states


def as_tree(states: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of :func:`capture` to a tree of arrays."""
    return {name: _array_of(name, state) for name, state in states.items()}


def _array_of(name: str, state: Any) -> Any:
    if name == "python":
        version, words, gauss = state
        return _packed(words, version, gauss is not None, gauss or 0.0)
    if name == "numpy":
        if state["bit_generator"] != "MT19937":  # the program has chosen another bit generator
            return state
        twister = state["state"]
        return _packed(twister["key"], twister["pos"], state["has_gauss"], state["gauss"])
    return [tensor.numpy() for tensor in state] if isinstance(state, list) else state.numpy()


def _packed(words: Any, counter: int, has_gauss: bool, gauss: float) -> NDArray[np.uint32]:
    """Pack the state of a Mersenne Twister into one array, including its cached normal deviate."""
    last = np.array([gauss], np.float64).view(np.uint32)
    return np.concatenate([np.array(words, np.uint32), np.array([counter, has_gauss], np.uint32), last])


def _unpacked(packed: Any) -> tuple[NDArray[np.uint32], int, bool, float]:
    array = np.asarray(packed, np.uint32)
    return array[:-4], int(array[-4]), bool(array[-3]), float(array[-2:].copy().view(np.float64)[0])


def restore(states: Mapping[str, Any]) -> list[str]:
    """Set the global generators to states from :func:`as_tree`; return the names of any whose device is missing."""
    try:
        if "python" in states:
            random.setstate(_state_of_python(states["python"]))
        if "numpy" in states:
            np.random.set_state(_state_of_numpy(states["numpy"]))
        torch: Any = loaded("torch")
        return [] if torch is None else _restore_torch(torch, states)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"global_generators: not the states of random generators: {error}") from error


def _restore_torch(torch: Any, states: Mapping[str, Any]) -> list[str]:
    if "torch" in states:
        torch.set_rng_state(torch.tensor(np.asarray(states["torch"]), dtype=torch.uint8))
    missing = []
    for name in _DEVICES:
        saved = states.get(name, ())
        count = getattr(torch, name).device_count() if saved and hasattr(torch, name) else 0
        for index, state in enumerate(saved[:count]):
            # torch defers this call until the program uses the device
            getattr(torch, name).set_rng_state(torch.tensor(state, dtype=torch.uint8), index)
        missing += [f"{name}:{index}" for index in range(count, len(saved))]
    if "mps" in states and _has_mps(torch):
        torch.mps.set_rng_state(torch.tensor(states["mps"], dtype=torch.uint8))
    elif "mps" in states:
        missing.append("mps")
    return missing


def _state_of_python(saved: Any) -> Any:
    if isinstance(saved, dict):  # the format that the first version of holdfast used in Lightning runs
        return saved["version"], tuple(saved["words"].tolist()), saved["gauss"]
    words, version, has_gauss, gauss = _unpacked(saved)
    return version, tuple(words.tolist()), gauss if has_gauss else None


def _state_of_numpy(saved: Any) -> Any:
    if isinstance(saved, dict):
        return saved
    key, position, has_gauss, gauss = _unpacked(saved)
    words = {"key": key, "pos": position}
    return {"bit_generator": "MT19937", "state": words, "has_gauss": int(has_gauss), "gauss": gauss}


def checksums(states: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum of each state, covering its plain values and the bytes of its arrays."""
    jax: Any = loaded("jax")
    sums = {}
    for name, state in states.items():
        arrays, text = leaves_of(state)
        sums[name] = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        for array in arrays:
            # Skip JAX arrays that are not ready, because reading them would block, and arrays that cannot be read.
            with contextlib.suppress(Exception):
                plain = jax.random.key_data(array) if is_jax_array(array) and is_key(array) else array
                if not is_jax_array(plain) or plain.is_ready():
                    sums[name] = zlib.crc32(np.asarray(plain).tobytes(), sums[name])
    return sums


class GlobalGenerators:
    """The global generators as a stateful object, restored last because other restores may draw random numbers."""

    def __init__(self) -> None:
        self._begun: dict[str, Any] = {}
        self._drawn: set[str] = set()
        self._restored: dict[str, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        return self.state_of(capture())

    def state_of(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Convert states from :func:`capture` to the form accepted by :meth:`set_state`."""
        drawn = self._drawn | {name for name, state in states.items() if not same_state(self._begun.get(name), state)}
        tree = as_tree(states)
        return {
            DRAWN: {name: state for name, state in tree.items() if name in drawn},
            IDLE: {name: state for name, state in tree.items() if name not in drawn},
        }

    def set_state(self, state: Any) -> None:
        """Keep saved states until :meth:`begin` applies them."""
        if not isinstance(state, dict) or not all(isinstance(state.get(part), dict) for part in (DRAWN, IDLE)):
            raise DamagedCheckpointError(f"global_generators: expected drawn and idle ones, found {state!r:.80}")
        self._restored = state

    def begin(self) -> list[str]:
        """Apply the saved states, if any; return the names of used generators whose device is missing."""
        missing: list[str] = []
        if self._restored is not None:
            self._drawn = set(self._restored[DRAWN])
            missing = restore({**self._restored[DRAWN], **self._restored[IDLE]})
        self._begun = capture()
        return [name for name in missing if name.partition(":")[0] in self._drawn]

    def set_back(self) -> None:
        """Reset the generators to the states that they had after :meth:`begin`."""
        restore(as_tree(self._begun))


def same_state(left: Any, right: Any) -> bool:
    """Return whether two states are equal, or True if they cannot be compared."""
    try:
        return _equal(left, right)
    except Exception:  # states may hold arbitrary objects, whose comparison may raise anything
        return True


def _equal(left: Any, right: Any) -> bool:
    if type(left) in _PLAIN and type(right) in _PLAIN:
        return bool(left == right or (left != left and right != right))  # NaN equals NaN here
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if set(map(type, left)) <= _EXACT and left == right:  # fast path: Python's generator state has 625 numbers
            return True
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    if left is None or right is None:
        return left is right
    if is_torch_tensor(left) and is_torch_tensor(right):
        return bool(left.equal(right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right) or np.asarray(left).tobytes() == np.asarray(right).tobytes()
    without: Any = object.__eq__
    if type(left).__eq__ is without and type(right).__eq__ is without:
        return True  # such objects are compared by identity, which does not show whether their contents are equal
    return bool(left == right)


def differing_parts(left: Any, right: Any) -> str:
    """Return the paths at which two states differ, as text."""
    flat = [flatten(state) for state in (left, right)]
    values, others = (dict(zip(part.names, part.values, strict=True)) for part in flat)
    names = values.keys() | others.keys()
    return shortened(sorted(name for name in names if not same_state(values.get(name), others.get(name))))


def is_idle(item: str, leaf: str) -> bool:
    """Return whether a leaf (such as ``global_generators.idle.python``) belongs to a generator that no step used."""
    return item.partition("/")[0] in ("extras", "process") and leaf.startswith(f"global_generators.{IDLE}.")


# ---- individual generators of the program or of a loader


def is_generator(obj: object) -> bool:
    torch: Any = loaded("torch")
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    # isinstance with torch.Generator runs Python code, which is too slow for loops that call this at every step
    return isinstance(obj, kinds) or (torch is not None and torch.Generator in type(obj).__mro__)


def generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        own: Any = generator.bit_generator
        return own.state | ({_SEEDS: own.seed_seq.state} if getattr(own.seed_seq, "n_children_spawned", 0) else {})
    if isinstance(generator, random.SystemRandom):
        raise OptionError(
            f"{type(generator).__qualname__} draws from the operating system and has no state, so that a resumed run "
            "draws other numbers: draw from random.Random(seed), or leave it out if nothing that counts depends on it"
        )
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return generator.get_state() if state["bit_generator"] == "MT19937" else state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from :func:`generator_state`, possibly one that was saved and loaded."""
    if isinstance(generator, np.random.Generator):
        # Some numpy bit generators require an array of words, so pass on the loaded array unchanged.
        own: Any = generator.bit_generator
        own.state = state
        with contextlib.suppress(KeyError, TypeError):  # the generator has spawned no others, or numpy is older than 2
            own.__setstate__((state, np.random.SeedSequence(**state[_SEEDS])))
    elif isinstance(generator, random.Random):
        if not isinstance(state, dict) or state.keys() != {"version", "words", "gauss"}:
            name = type(generator).__qualname__
            raise DamagedCheckpointError(
                f"{name}: expected the state of a random.Random, found {type(state).__qualname__}"
            )
        generator.setstate((state["version"], tuple(int(word) for word in state["words"]), state["gauss"]))
    else:
        generator.set_state(state)

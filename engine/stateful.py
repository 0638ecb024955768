"""The state of anything that carries one: data iterators, generators, timers.

An object is *stateful* when it has ``get_state``/``set_state`` (Grain iterators, ``torch.Generator``),
``state_dict``/``load_state_dict`` (torch, torchdata), or is one of the random generators of numpy or the standard
library. :func:`state_of` takes its state as a tree of containers, arrays and plain values, which is a snapshot: what
the object does later does not change it. :func:`restore_state` gives it back, from what was loaded without a template.

Arrays of torch and jax are wrapped in a one-entry dict that names their library, so that they come back as what they
were, although a checkpoint loads as numpy arrays when nothing else is asked for.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from .errors import DamagedCheckpointError, OptionError

_TORCH = "torch.Tensor"
_JAX = "jax.Array"
_KEY = "jax.random.key"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def is_stateful(thing: object) -> bool:
    """Returns whether the object has a state that can be taken and given back in place."""
    return isinstance(thing, (random.Random, np.random.Generator)) or _methods(thing) is not None


def state_of(thing: object) -> Any:
    """Returns a snapshot of an object's state.

    Args:
        thing: A stateful object, or plain data (``None``, bool, int, float, str, bytes, and lists, tuples and dicts
            of them), whose state is itself.

    Returns:
        A tree that an engine's checkpoint can hold: containers, numpy arrays and plain values, and one-entry dicts
        around arrays of torch and jax.

    Raises:
        OptionError: The object has no state that one could take.
    """
    if isinstance(thing, np.random.Generator):
        return encode_state(thing.bit_generator.state)
    if isinstance(thing, random.Random):
        version, words, gauss = thing.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    methods = _methods(thing)
    if methods is not None:
        return encode_state(getattr(thing, methods[0])())
    if not is_plain(thing):
        raise OptionError(
            f"{type(thing).__qualname__} has no state to save: give it get_state() and set_state(state), or "
            "state_dict() and load_state_dict(state), or pass plain data"
        )
    return thing


def restore_state(thing: object, state: Any) -> Any:
    """Gives an object the state that :func:`state_of` took, as loaded without a template.

    Args:
        thing: The object to bring back; anything that is not stateful stands for plain data.
        state: What was loaded.

    Returns:
        The object itself, changed in place, or for plain data the state.

    Raises:
        DamagedCheckpointError: The state is of another kind of object.
    """
    if isinstance(thing, np.random.Generator):
        # numpy takes the words of some bit generators as arrays only, and loading keeps them arrays.
        thing.bit_generator.state = decode_state(state)
        return thing
    if isinstance(thing, random.Random):
        if not isinstance(state, dict) or state.keys() != {"version", "words", "gauss"}:
            raise DamagedCheckpointError(
                f"{type(thing).__qualname__}: expected the state of a random.Random, found {type(state).__qualname__}"
            )
        thing.setstate((state["version"], tuple(int(word) for word in state["words"]), state["gauss"]))
        return thing
    methods = _methods(thing)
    if methods is not None:
        getattr(thing, methods[1])(decode_state(state))
        return thing
    return decode_state(state)


def is_plain(value: object) -> bool:
    """Returns whether a value is made of plain data only: no arrays, no objects."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def _methods(thing: object) -> tuple[str, str] | None:
    if isinstance(thing, type):
        return None
    for getter, setter in _METHODS:
        if callable(getattr(thing, getter, None)) and callable(getattr(thing, setter, None)):
            return getter, setter
    return None


def encode_state(value: Any) -> Any:
    """Returns a snapshot of a tree, with arrays of torch and jax wrapped so that they come back as what they were."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        entries = {key: encode_state(item) for key, item in value.items()}
        # A plain dict would lose the order and the type that an OrderedDict or a Counter has.
        return entries if type(value) is dict else _like(value, entries)
    if type(value) in (list, tuple):
        return type(value)(map(encode_state, value))
    if isinstance(value, np.ndarray):
        return value.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {_TORCH: value.detach().clone()}
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {_KEY: jax.random.key_data(value), "impl": str(jax.random.key_impl(value))}
        return {_JAX: value}
    return value


def _like(original: Any, entries: dict[Any, Any]) -> Any:
    copied = original.copy()
    for key, item in entries.items():  # not update(), which adds up in a Counter
        copied[key] = item
    return copied


def decode_state(value: Any) -> Any:
    """Gives back what :func:`encode_state` was given, from what was loaded without a template."""
    if isinstance(value, dict):
        if value.keys() == {_TORCH}:
            return _tensor(value[_TORCH])
        if value.keys() == {_JAX}:
            import jax.numpy as jnp

            return jnp.asarray(value[_JAX])
        if value.keys() == {_KEY, "impl"}:
            import jax

            return jax.random.wrap_key_data(jax.numpy.asarray(value[_KEY]), impl=value["impl"])
        entries = {key: decode_state(item) for key, item in value.items()}
        return entries if type(value) is dict else _like(value, entries)
    if type(value) in (list, tuple):
        return type(value)(map(decode_state, value))
    return value


def _tensor(array: Any) -> Any:
    import torch

    if isinstance(array, torch.Tensor):
        return array
    array = np.asarray(array)
    if array.dtype.kind == "V" or array.dtype.type.__module__.startswith("ml_dtypes"):
        # torch knows these types by the same names, but numpy hands it their bytes only.
        bits = torch.from_numpy(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name)).reshape(array.shape)
    return torch.from_numpy(np.array(array))

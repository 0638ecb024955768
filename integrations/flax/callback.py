"""The callback of a JAX or Flax training loop."""

from __future__ import annotations

from typing import ClassVar

from ..loop import LoopArguments, LoopCallback, StateAdapter
from ..options import documents
from .states import FlaxAdapter


@documents(LoopArguments)
class CheckpointCallback(LoopCallback):
    """Saves a training loop's state, keeps the right checkpoints, and brings the loop back where it was.

    ::

        with CheckpointCallback("runs/digits/checkpoints", save_interval_steps=100, max_to_keep=3) as checkpoint:
            state, start = checkpoint.restore_or_initialize(state, data=batches)
            for step in range(start, total_steps):
                state, metrics = train_step(state, next(batches))
                if checkpoint.on_step(step + 1, state, metrics=metrics, data=batches).should_stop:
                    break

    Step N means that N optimizer updates are in the state, so ``on_step(step + 1, ...)`` comes after the update. A run
    that is interrupted anywhere and resumed ends bit for bit where the uninterrupted run does, provided that the
    state and the extras have everything that the loop depends on.

    The state is a ``TrainState`` or any other pytree, which is never changed, or an nnx object or dicts, lists and
    tuples of nnx objects, which are updated in place. ``init_from`` takes the ``params`` of a pytree, or the parameters
    of the one nnx module in the state. With ``save_on_best``, the metric is fetched from the device at every step that
    reports it.

    Extras are named as you like, and are any of these:

    - an object with ``get_state`` and ``set_state``, or ``state_dict`` and ``load_state_dict``, a numpy ``Generator``
      or a ``random.Random``: restored in place;
    - nnx objects, such as ``nnx.Rngs``: restored in place;
    - pytrees with arrays or typed PRNG keys: ``checkpoint.extras[name]`` is the restored value, with the types, dtypes
      and shardings of what was passed;
    - plain data (None, numbers, strings, bytes, and dicts, lists and tuples of them): ``checkpoint.extras[name]`` is
      the restored value as it was saved; the passed value is no template.

    SIGTERM only sets a flag. The next ``on_step`` saves, waits until the files are durable, and asks to stop. Leaving
    the ``with`` block saves the last step if it is not saved yet, waits for the files and closes. Leaving it by an
    exception saves nothing more, but lets a save that is under way finish.

    In a program of several processes (``jax.distributed``), each makes a callback and calls it at every step. All save
    the arrays together; each process saves and restores its own of the other extras, such as data iterators.

    Args:
        {arguments}

    Attributes:
        extras: The extras by name as they were restored; as they were passed, after a fresh start.

    Raises:
        OptionError: The value of an option is invalid.
    """

    _adapter_type: ClassVar[type[StateAdapter]] = FlaxAdapter

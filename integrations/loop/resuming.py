"""Implements the ``resume=`` option and restores the newest intact checkpoint."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import glob
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    HoldfastError,
    StateError,
    TreeMismatchError,
    shortened,
    shortened_steps,
)
from ...engine.generators import DRAWN, IDLE, is_generator, same_state
from ...engine.handlers import SavedShares
from ...engine.loaders import is_torchdata_loader
from ...engine.manager import EVENTS, CheckpointManager, Peek, Restored, elsewhere, has_finished, note_resume
from ...engine.pytree import decode_state, encode_state
from ...engine.sources import Misfits
from ...engine.stateful import begins_epoch, is_elastic, is_stream, restore_loader, restore_state
from ...engine.steps import list_steps, newest_step, series_of
from ...engine.storage import Location, as_location
from ..hugging_face import as_start
from ..options import Resume
from .announce import announce
from .extras import CHECKSUMS, GLOBAL_GENERATORS, GRADIENTS, is_own, is_template, templates_of
from .first_steps import warn_of_index
from .initial import HYPERPARAMETERS, Hyperparameters, InitialState
from .objects import set_gradients
from .states import STATE, LoopArguments, Start, StateAdapter
from .trees import from_tree

logger = logging.getLogger("holdfast")

# Matches path components that change at each start of a program: Hydra's timestamps and loggers' version numbers.
_PER_START = re.compile(r"\d{4}-\d\d-\d\d([_T]\d\d-\d\d-\d\d)?|\d\d-\d\d-\d\d|version_\d+")
_MOST_NEIGHBOURS = 20  # maximum number of directories to search

_CHANGED = (
    "A run resumes with the state that it had, or not at all. To continue with another model or optimizer, begin a run "
    "in another directory: init_from= takes weights. partial='initialize' restores what fits, also of the weights of "
    "init_from, and keeps the rest as it was initialized. For a state that grows while it trains, checkpoint.peek() "
    "returns the step before the state is built."
)


def all_steps(directory: Location, prefix: str | None = None, manager: CheckpointManager | None = None) -> list[int]:
    """Return all steps in a directory, even damaged ones, and the manager's newest step, which may be host-local."""
    steps = {entry.step for entry in list_steps(directory, series_of(prefix))}
    newest = None if manager is None else manager.latest_step()
    return sorted(steps if newest is None else {*steps, newest})


def unfinished_neighbour(directory: Location) -> str:
    """Return a hint about an unfinished run whose path differs only in a timestamp or counter, or "" if none exists."""
    # Hydra adds the start time to the path, and Lightning loggers add a counter, so each restart uses a new directory.
    if not directory.is_local:
        return ""
    parts = directory.path.parts
    if not any(map(_PER_START.fullmatch, parts)):
        return ""
    patterns = [re.sub("[0-9]+", "[0-9]*", part) if _PER_START.fullmatch(part) else glob.escape(part) for part in parts]
    with contextlib.suppress(OSError, HoldfastError):
        neighbours = sorted(glob.glob(os.path.join(*patterns)), key=os.path.getmtime, reverse=True)
        for path in neighbours[:_MOST_NEIGHBOURS]:
            newest = newest_step(list_steps(as_location(path)), whole=True)
            if newest is None:
                continue
            if has_finished(Path(path, EVENTS)):
                break
            return (
                f". {path} holds step {newest.step} of a run that has not finished. If that is this run, give it a "
                "directory that is the same at every start; with Hydra, set hydra.run.dir"
            )
    return ""


def check_resume(
    resume: Resume,
    steps: Sequence[int],
    directory: object,
    *,
    option: str = "resume={!r}",
    elsewhere: str = "choose another directory, delete this one",
) -> None:
    """Raise an error if ``resume`` is ``"must"`` but no steps exist, or if it is ``"never"`` but steps exist."""
    # In the messages, ``option`` is the option as the user writes it, and ``elsewhere`` says how to start a new run.
    auto = option.format("auto")
    if resume == "must" and not steps:
        raise CheckpointNotFoundError(
            f"{option.format(resume)}, but there is no checkpoint in {directory}; check the path, or set {auto} to "
            f"start fresh when there is none{unfinished_neighbour(as_location(str(directory)))}"
        )
    if resume == "never" and steps:
        raise CheckpointExistsError(
            f"{option.format(resume)}, but {directory} holds {len(steps)} checkpoint(s), the newest of step "
            f"{steps[-1]}; {elsewhere}, or set {auto} to resume from there"
        )


def resume_step(resume: Resume, manager: CheckpointManager, *, option: str = "resume={!r}") -> int | None:
    """Return the step that ``resume`` selects, by number or as ``"best"``; None stands for the newest step."""
    if resume != "best" and type(resume) is not int:
        return None
    steps = manager.all_steps()
    step = resume
    if resume == "best":
        ranked = any(map(manager.metrics, steps))
        step = (manager.best_step() if ranked else None) or "best"
    # All processes must fetch the step together, even if some of them can already see it in the directory.
    fetches = not manager.options.read_only and (manager.options.mirror or manager.options.local) is not None
    if manager.fetch(step) if fetches and type(step) is int else step in steps:
        return int(step)
    why = f"it has the steps {shortened_steps(steps)}" if steps else "it has no checkpoint"
    if resume == "best" and steps:
        why = "no step has the metric that ranks them"
    raise CheckpointNotFoundError(
        f"{option.format(resume)}, but {manager.directory} has no such step: {why}{elsewhere(manager, step)}. Name one "
        f"that is there, or set {option.format('auto')} to resume from the newest"
    )


def restore(
    manager: CheckpointManager,
    adapter: StateAdapter,
    initial: InitialState,
    hyperparameters: Hyperparameters,
    extras: Mapping[str, Any],
    options: LoopArguments,
) -> Start | None:
    """Restore the newest intact checkpoint or the step that ``resume`` selects. Return None if there is none."""
    # Except in component trees, all values are read before any object is changed in place.
    if options.resume == "never":
        return None
    chosen = resume_step(options.resume, manager)
    template = initial.template
    templates: dict[str, Any] = {STATE: adapter.template(template)}
    kwargs = {STATE: adapter.restore_kwargs()}
    if has_extras := bool(extras) or adapter.is_live:
        templates |= {"extras": None, "process": None}
        typed = templates_of(extras)
        as_saved = {GRADIENTS} | (extras.keys() - typed.keys())
        kwargs |= {"extras": {"entries": typed, "as_saved": as_saved}, "process": {"as_saved": True, "every": True}}
    try:
        if chosen is None:
            restored = manager.restore_latest(templates, restore_kwargs=kwargs)
        else:
            restored = Restored(chosen, manager.restore(chosen, templates, restore_kwargs=kwargs))
    except TreeMismatchError as error:
        error.add_note(_CHANGED)
        raise
    if restored is None:
        return None
    step = restored.step
    values, gradients = _restore_extras(manager, adapter, restored, extras, options) if has_extras else ({}, None)
    state = _in_class_of(template, adapter.from_tree(template, restored.items[STATE]))
    if gradients:
        _restore_gradients(state, values, gradients)
    if restored.skipped:
        lost = ", ".join(str(skipped) for skipped, _ in restored.skipped)
        logger.warning("fell back past damaged steps (%s): resumed from step %d in %s", lost, step, manager.directory)
    else:
        announce("resumed from step %d in %s", step, manager.directory, shown=manager.processes.is_primary)
    metadata, shown = manager.custom_metadata(step) or {}, manager.processes.is_primary
    state = initial.completed(adapter, state)
    began = metadata.get(HYPERPARAMETERS, {})
    state = hyperparameters.settle(state, extras, options.hyperparameters, shown=shown, began=began)
    if chosen is not None:
        note_resume(manager, chosen)  # warns about later steps
    warn_of_misfits(adapter.misfits, f"step {step}", STATE)
    offset: int | None = options.step_offset
    if offset is None:
        offset = int(metadata.get("step_offset", 0))
        if has_extras and "extras" not in restored.items and not offset:  # probably saved by another program
            warn_of_index(step, adapter.to_tree(state))
    return Start(step, state, values, offset)


def peek(manager: CheckpointManager, resume: Resume) -> Peek | None:
    """Read the extras, metrics and metadata of the checkpoint that :func:`restore` would restore."""
    if resume == "never":
        return None
    peeked = manager.peek(["extras", "process"], step=resume_step(resume, manager))
    if peeked is None:
        return None
    saved = {**(peeked.extras.get("extras") or {}), **(peeked.extras.get("process") or {})}
    given = {name: value for name, value in saved.items() if name not in (GRADIENTS, CHECKSUMS, GLOBAL_GENERATORS)}
    return dataclasses.replace(peeked, extras={name: _decoded(value) for name, value in given.items()})


def _decoded(value: Any) -> Any:
    try:
        return decode_state(value)
    except StateError:  # the state uses a class that the program has not defined
        return value


def warn_of_misfits(misfits: Misfits | None, source: str, target: str) -> None:
    """Warn about values that a partial restore could not take from the checkpoint, if there are any."""
    if misfits is not None and (text := str(misfits)):
        logger.warning("%s does not have all of the %s (partial='initialize'):%s", source, target, text)


def _saved_extras(
    manager: CheckpointManager, restored: Restored, extras: Mapping[str, Any], options: LoopArguments
) -> tuple[dict[str, Any], list[str]]:
    """Return the saved extras by name, and the names of generators that have no saved state for this process."""
    common, per_process = dict(restored.items.get("extras", {})), restored.items.get("process")
    common.pop(CHECKSUMS, None)
    if isinstance(per_process, SavedShares):
        shares = per_process.trees
    elif per_process is not None or manager.processes.alone:
        return {**common, **(per_process or {})}, []
    else:  # a single process saved its own extras together with the shared ones
        names = [name for name, extra in extras.items() if is_own(name, extra, options.replicated) and name in common]
        shares = ({name: common.pop(name) for name in names},)
    where = f"step {restored.step} in {manager.directory}"
    index, count = manager.processes.index, manager.processes.count
    fresh, refused = [], []
    for name, extra in extras.items():
        states = [share[name] for share in shares if name in share]
        if not states:
            continue
        if name == GLOBAL_GENERATORS or is_generator(extra):
            if index < len(states):
                common[name] = states[index]
            elif (alike := _drawn_alike(name, states)) is not None:
                common[name] = alike
            else:
                fresh.append(name)
        elif (not is_stream(extra) or is_elastic(extra)) and all(same_state(state, states[0]) for state in states):
            common[name] = states[0]
        elif options.reshard is not None:
            common[name] = encode_state(options.reshard(name, [decode_state(state) for state in states], index, count))
        else:
            refused.append(name)
    if refused:
        listed = ", ".join(f"{name}=" for name in refused)
        raise StateError(
            f"{where} was saved by {len(shares)} processes, and {count} are to continue: the states of {listed} belong "
            "to one process each, such as a place in the data, and nothing says which belong to other processes. Give "
            "CheckpointCallback reshard=, a function of (name, states, process_index, process_count) that returns the "
            f"state of one process; or leave {listed} out of restore_or_initialize and pass it to on_step only, to "
            "start it again. A state that is saved as one of all processes (replicated=) needs neither"
        )
    generators = [name for name in shares[-1] if name == GLOBAL_GENERATORS or is_generator(extras.get(name))]
    if fresh:
        text = (
            "%s was saved by %d processes: process %d keeps its fresh random generators, as the program has seeded "
            "them: %s. Generators that draw alike on all processes must be named in replicated= before the save"
        )
        logger.warning(text, where, len(shares), index, ", ".join(fresh))
    elif len(shares) > count and index == 0 and generators:
        text = "%s was saved by %d processes, and %d continue: the random generators of the others are left: %s"
        logger.warning(text, where, len(shares), count, ", ".join(generators))
    return common, fresh


def _drawn_alike(name: str, states: Sequence[Any]) -> Any | None:
    """Return a generator's saved state if several processes saved equal states for it; otherwise, return None."""
    if name == GLOBAL_GENERATORS:  # ignore idle generators, which may be unseeded
        states = [{DRAWN: state[DRAWN], IDLE: {}} for state in states if state.get(DRAWN)]
    return states[0] if len(states) > 1 and all(same_state(state, states[0]) for state in states) else None


def _restore_gradients(state: Any, extras: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = []
    for root, objects in (("state.", state), ("extras.", extras)):
        gradients = {name.removeprefix(root): value for name, value in saved.items() if name.startswith(root)}
        missing += [f"{root}{name}" for name in set_gradients(objects, decode_state(gradients))] if gradients else []
    if missing:
        logger.warning("accumulated gradients are lost, as their parameters are gone: %s", shortened(missing))


def _in_class_of(fresh: Any, value: Any) -> Any:
    """Convert a dictionary to the class of ``fresh`` if it was saved without its class or default factory."""
    if type(fresh) is type(value) is dict and fresh is not value:
        return {key: _in_class_of(fresh.get(key), item) for key, item in value.items()}
    is_encoded = type(value) is dict and not all(isinstance(key, (str, int)) for key in value)
    is_less = is_encoded or (isinstance(value, defaultdict) and value.default_factory is None)
    if not isinstance(fresh, dict) or type(fresh) is dict or not is_less:
        return value
    built = copy.copy(fresh)
    built.clear()
    for key, item in value.items():  # Counter.update() adds counts instead of replacing them
        built[key] = item
    return built


def _restore_extras(
    manager: CheckpointManager,
    adapter: StateAdapter,
    restored: Restored,
    extras: Mapping[str, Any],
    options: LoopArguments,
) -> tuple[dict[str, Any], Any]:
    """Restore the extras that were saved. Return all extras by name, and the saved gradients."""
    (saved, fresh), step = _saved_extras(manager, restored, extras, options), restored.step
    kept = {name: extra for name, extra in extras.items() if name in fresh or (extra is None and name not in saved)}
    if GLOBAL_GENERATORS in extras and GLOBAL_GENERATORS not in saved and GLOBAL_GENERATORS not in fresh:
        kept[GLOBAL_GENERATORS] = extras[GLOBAL_GENERATORS]
        logger.warning(
            "step %d was saved without the global random generators of Python, numpy and torch (by an earlier version, "
            "or with global_generators=False): they stay as the program and its extras have set them. Steps that draw "
            "from others draw other numbers than the run would have drawn",
            step,
        )
    if left := sorted(saved.keys() - extras.keys() - {GLOBAL_GENERATORS, GRADIENTS, CHECKSUMS}):
        announce("step %d has extras that this program does not pass: %s", step, ", ".join(f"{name}=" for name in left))
    if adapter.misfits is not None:
        new = {name: extra for name, extra in extras.items() if name not in saved and name not in kept}
        adapter.misfits.missing(f"{name}=" for name in new)
        kept |= new
    extras = {name: extra for name, extra in extras.items() if name not in kept}
    if missing := [name for name in extras if name not in saved]:
        names = ", ".join(f"{name}=" for name in missing)
        raise TreeMismatchError(
            f"step {step} in {manager.directory} does not hold all extras that are to be restored (it holds: "
            f"{', '.join(saved) or 'none'}). Leave {names} out of restore_or_initialize and pass it to on_step only, "
            "to begin saving it from now on",
            [f"{name}: expected an extra of this name, found none" for name in missing],
        )
    values = {name: saved[name] for name in extras}
    for name, extra in sorted(extras.items(), key=lambda item: not begins_epoch(item[1])):
        try:
            if is_template(extra):
                values[name] = from_tree(extra, saved[name])
            elif is_torchdata_loader(extra):
                values[name] = extra
                if note := restore_loader(extra, saved[name], as_start, extras.get(GLOBAL_GENERATORS)):
                    announce("%s= %s", name, note, shown=manager.processes.is_primary)
            else:
                values[name] = _in_class_of(extra, restore_state(extra, saved[name], as_start))
        except Exception as error:
            error.add_note(f"raised when {name}= was restored from step {step} in {manager.directory}")
            raise
    return {**values, **kept}, saved.get(GRADIENTS)

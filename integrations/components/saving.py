"""Save component trees: prepare all states before anything is written, then commit them together.

The metadata records library versions and the commit of the program's git repository.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any

from ...engine import __version__
from ...engine.arrays import Layout, WrittenSteps, write_file
from ...engine.checkpoint import commit_protocol
from ...engine.clock import SystemClock
from ...engine.distributed import ProcessInfo, current_coordinator
from ...engine.errors import OptionError, UnsupportedLeafError, shortened
from ...engine.format import COMPONENT, RECORD, TREES, CheckpointRecord, FileRecord, ItemRecord
from ...engine.handlers import Files, PreparedItem, PyTreeCheckpointHandler, SaveArgs
from ...engine.pytree import collection_paused, flatten, format_path, import_path, is_jax_array, is_torch_tensor
from ...engine.stateful import ActorState, adapted
from ...engine.storage import Location
from ..graph import Path
from .constructor_spec import encode_spec
from .layout import DATA, METADATA, ComponentParts, Description, below, item_name, part_records
from .live import LiveComponent, discovered, is_component, live_tree, method_of
from .names import STATE, format_component_path
from .states import divided, own_states

_logger = logging.getLogger("holdfast")

_REMOTE = "holdfast.integrations.ray.components:RemoteComponent"  # class to save for actor handles; can start actors


@dataclass(frozen=True, slots=True)
class PreparedComponents:
    """A component tree that is ready to be written, either as a checkpoint or as an item of one."""

    states: Mapping[Path, PreparedItem]  # keyed by component path; () is the root
    descriptions: Mapping[Path, bytes]  # contents of the component description files
    files: dict[str, FileRecord] = field(default_factory=dict)  # the item's files, filled in by `write`

    def commit(
        self, location: Location, *, overwrite: bool, step: int | None, metrics: Mapping[str, float] | None
    ) -> None:
        """Write the tree to a directory as an atomic checkpoint."""
        paths = {item_name(path): path for path in self.states}
        parts = ComponentParts(location, self.descriptions)
        pending = commit_protocol(location)(location, paths, overwrite=overwrite, parts=parts)
        try:
            pending.begin()
            items = self._write_states({paths[item]: folder for item, folder in pending.folders.items()})
            pending.commit(CheckpointRecord(items=items, time=SystemClock().now(), step=step, metrics=metrics))
        except BaseException as error:
            pending.abort(error)
            raise

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        # called only on process 0
        items = self._write_states({path: below(folder, path) / STATE for path in self.states}, member.awaited)
        self.files.clear()
        for item in items.values():
            self.files.update((f"{item.folder}/{name}", file) for name, file in item.files.items())
        for path, record in part_records(CheckpointRecord(items=items, time=SystemClock().now())).items():
            for name, content in {RECORD: record.encode(), METADATA: self.descriptions[path]}.items():
                self.files["/".join((*path, name))] = write_file(below(folder, path) / name, content)
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return self.files

    def _write_states(
        self, folders: Mapping[Path, Location], awaited: threading.Event | None = None
    ) -> dict[str, ItemRecord]:
        items = {}
        for path, folder in folders.items():
            (folder / DATA).make_directory(sync=False)
            described = write_file(folder / COMPONENT, self.descriptions[path])
            state = self.states[path]
            files = {**state.merge(folder, [state.write(folder, ProcessInfo(awaited=awaited))]), COMPONENT: described}
            items[item_name(path)] = ItemRecord("/".join((*path, folder.name)), TREES, files)
        return items


def prepare(
    root: Any,
    *,
    state: Mapping[str, Any] | None = None,
    use_msgpack: bool = False,
    layout: Layout | None = None,
    handlers: dict[Path, PyTreeCheckpointHandler] | None = None,
    reuse: WrittenSteps | None = None,
) -> PreparedComponents:
    """Prepare the states and descriptions of a component and all components below it."""
    if layout is not None and not isinstance(layout, Layout):
        raise OptionError(f"layout={layout!r:.80} must be a Layout, such as hf.Layout(compression=3)")
    if use_msgpack and layout is not None and layout.compression is not None:
        raise OptionError("use_msgpack=True does not work with compression: arrays in msgpack are not compressed")
    if state is not None and not isinstance(state, Mapping):
        raise OptionError(f"state= must be a dictionary like that of get_state(), found {type(state).__name__}")
    live = live_tree(root)
    states = _own_states(live) if state is None else _given(live, state)
    snapshot = handlers is not None
    handlers = {} if handlers is None else handlers
    for gone in handlers.keys() - states.keys():
        del handlers[gone]
    save_args = SaveArgs(aggregate=True) if use_msgpack else None
    prepared: dict[Path, PreparedItem] = {}
    with collection_paused():
        for path, tree in states.items():
            handler = handlers.setdefault(path, PyTreeCheckpointHandler())
            old = None if reuse is None else reuse.part("/".join(path))
            try:
                prepared[path] = handler.prepare(tree, snapshot=snapshot, save_args=save_args, layout=layout, reuse=old)
            except TypeError as error:
                error.add_note(f"in the state of the component {format_component_path(path)}; nothing was written")
                raise
    _refuse_divided(states)
    components = {component.path: component for component in live.walk()}
    paths = {id(component.value): path for path, component in components.items()}
    return PreparedComponents(prepared, {path: _described(components[path], paths, states).encode() for path in states})


def _refuse_divided(states: Mapping[Path, Any]) -> None:
    """Raise UnsupportedLeafError for arrays that are sharded across processes."""
    flat = {path: flatten(tree) for path, tree in states.items() if current_coordinator().process_count > 1}
    leaves = [(path, *leaf) for path, tree in flat.items() for leaf in zip(tree.names, tree.values, strict=True)]
    shards = [f"{format_component_path(path)}: {format_path(name)}" for path, name, leaf in leaves if _is_divided(leaf)]
    if shards:
        raise UnsupportedLeafError(
            "these arrays are divided among processes, but components are saved by one process; nothing was written. "
            f"Save them as a tree (hf.save, PyTreeCheckpointHandler), or gather them in get_state(): "
            f"{shortened(shards, 20)}"
        )


def _is_divided(value: Any) -> bool:
    if is_jax_array(value):
        return not (value.is_fully_addressable or value.is_fully_replicated)
    placements = getattr(value, "placements", None) if is_torch_tensor(value) else None
    return placements is not None and not all(placement.is_replicate() for placement in placements)


def _own_states(live: LiveComponent) -> dict[Path, Any]:
    named = {id(component.value) for component in live.walk()}
    for component in live.walk():
        for name in [name for name, child in discovered(component.value) if id(adapted(child)) not in named]:
            _logger.warning(
                "component %s: %s is a component that get_checkpointable_components() does not name; it is not saved",
                format_component_path(component.path),
                name,
            )
    return own_states(list(live.walk()))


def _given(live: LiveComponent, state: Mapping[str, Any]) -> dict[Path, Any]:
    """Split the state of a whole tree into the states of its components, without modifying it."""
    own_state, below = divided(live, state)
    states: dict[Path, Any] = {live.path: own_state}
    for child, inner in below:
        states.update(_given(child, inner) if isinstance(inner, Mapping) else {child.path: inner})
    return states


def _described(component: LiveComponent, paths: Mapping[int, Path], saved: Mapping[Path, Any]) -> Description:
    value = component.value
    spec, obstacle = _spec_of(value, paths)
    now = datetime.datetime.fromtimestamp(SystemClock().now(), datetime.UTC)
    method = method_of(value, "get_metadata")
    return Description(
        type=_REMOTE if isinstance(value, ActorState) else import_path(type(value)),
        constructor=spec,
        obstacle=obstacle,
        path=component.path,
        components=tuple(component.relative(child) for child in component.children if child.path in saved),
        same={path[len(component.path) :]: target for path, target in component.same.items()},
        metadata={
            "time": now.isoformat(timespec="seconds"),
            "versions": versions(),
            "commit": commit_of(type(value).__module__),
            **({} if method is None else method()),
        },
    )


def _spec_of(value: Any, paths: Mapping[int, Path]) -> tuple[dict[str, Any] | None, str]:
    """Return an object's constructor spec, or None together with the reason why the spec is unknown."""
    method, name = method_of(value, "get_ctor_args_and_kwargs"), type(value).__qualname__
    if isinstance(value, ActorState):
        return None, (
            "an actor handle does not know them, whereas RemoteComponent(Class, ...) does, in place of "
            "Class.remote(...). Pass kind=Class, with the arguments of Class by name"
        )
    if method is None:
        return None, f"{name} has no get_ctor_args_and_kwargs()"
    arguments = method()
    if arguments is None:
        return None, f"{name} was not made by its constructor; give it get_ctor_args_and_kwargs()"
    args, kwargs = arguments

    def reference(other: Any) -> str | None:
        other = adapted(other)
        return "/" + "/".join(paths[id(other)]) if id(other) in paths and other is not value else None

    entered = {id(value)}

    def nested(other: Any) -> dict[str, Any] | None:
        other = adapted(other)
        if not is_component(other) or id(other) in entered:
            return None
        entered.add(id(other))
        spec, _ = _spec_of(other, paths)
        return None if spec is None else {"class": import_path(type(other)), "constructor": spec}

    spec, problems = encode_spec(tuple(args), dict(kwargs), reference, nested)
    for problem in problems:
        _logger.warning("%s: the constructor's %s; from_checkpoint() will need it as an argument", name, problem)
    return spec, ""


# ---- the provenance of a checkpoint

_LIBRARIES = ("numpy", "torch", "jax", "flax", "optax")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_GIT_LIMIT = 4 << 20  # maximum number of bytes read from a git file


def versions() -> dict[str, str]:
    """Return the versions of Python, holdfast and the libraries in use."""
    libraries = {"python": platform.python_version(), "holdfast": __version__}
    for name in (name for name in _LIBRARIES if name in sys.modules):
        with contextlib.suppress(metadata.PackageNotFoundError):
            libraries[name] = _version(name)
    return libraries


_version = functools.cache(metadata.version)


@functools.cache
def commit_of(module: str) -> str | None:
    """Return the commit of a module's git repository, or None, without running git."""
    # Cached, because later commits do not describe the code that was loaded.
    file = getattr(sys.modules.get(module), "__file__", None)
    return commit_in(FilePath(file).resolve().parent if isinstance(file, str) else FilePath.cwd())


def commit_in(start: FilePath) -> str | None:
    """Return the commit of the git repository that contains a folder, or None, without running git."""
    with contextlib.suppress(OSError, ValueError):
        for folder in (start, *start.parents):
            git = folder / ".git"
            if git.is_file():  # the .git file of a worktree or a submodule
                git = folder / _read_text(git).removeprefix("gitdir:").strip()
            if git.is_dir():
                return _head(git)
    return None


def _head(git: FilePath) -> str | None:
    commit, common = _read_text(git / "HEAD"), git / "commondir"
    if commit.startswith("ref:"):
        reference = commit.removeprefix("ref:").strip()
        if ".." in reference.split("/") or os.path.isabs(reference):
            return None
        for directory in [git, git / _read_text(common)] if common.is_file() else [git]:
            if (directory / reference).is_file():
                commit = _read_text(directory / reference)
                break
            packed = _read_text(directory / "packed-refs") if (directory / "packed-refs").is_file() else ""
            if line := re.search(rf"^([0-9a-f]+) {re.escape(reference)}$", packed, re.MULTILINE):
                commit = line[1]
                break
    return commit if _COMMIT.fullmatch(commit) else None


def _read_text(file: FilePath) -> str:
    with file.open("rb") as opened:
        return opened.read(_GIT_LIMIT).decode("utf-8").strip()

"""Adapters for live objects that are restored in place: torch modules and optimizers, object graphs and components.

A framework is imported only if the state contains objects of that framework.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ...engine.distributed import current_coordinator
from ...engine.errors import UnsupportedLeafError, shortened
from ...engine.handlers import DEFAULT_REGISTRY, AsyncCheckpointHandler
from ...engine.loaders import derives
from ...engine.pytree import (
    Sampler,
    Samples,
    expand,
    is_jax_abstract,
    is_jax_array,
    is_nnx,
    is_optimizer,
    is_python_value,
    is_torch_tensor,
    loaded,
)
from ...engine.sources import Misfits, Weights, find_checkpoint, load_weights
from ...engine.storage import Place, as_location
from ..options import CallbackOptions
from .announce import announce
from .states import STATE, StateAdapter, located
from .trees import TreeAdapter

if TYPE_CHECKING:
    from ..graph import Checkpoint, FreshObjects, StoredGraph

logger = logging.getLogger("holdfast")

_SAMPLED = 8  # number of parameters to sample if torch does not count their changes
# Classes in torch.distributed whose parameters or state differ between processes, mapped to advice.
_DIVIDED = {
    ("optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"): "divides its state among the processes, so that no "
    "process can save all of it. Leave it out of the state, and pass the part of each process as an extra, "
    "shard=optimizer.optim. If a scheduler changes lr, pass it as an extra, and after a resume, set lr in "
    "optimizer.param_groups to scheduler.get_last_lr()",
    ("optim.post_localSGD_optimizer", "PostLocalSGDOptimizer"): "trains other parameters in each process between two "
    "averages. Pass what each process saves itself as extras: restore_or_initialize({}, model=model, "
    "optimizer=optimizer). Then set iter of the PostLocalSGDState to the step",
    ("fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "divides parameters in a way that no checkpoint "
    "can join. Divide the model with torch.distributed.fsdp.fully_shard (FSDP2)",
}
# Packages whose objects are not searched for tensors.
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "jax", "jaxlib", "flax", "optax"}


def is_versioned(value: object) -> bool:
    """Return whether a value is a torch module or optimizer, whose tensors have version counters."""
    return is_optimizer(value) or _is_module(value)


def is_component(value: object) -> bool:
    components: Any = _imported("components")
    return components is not None and isinstance(value, components.Checkpointable)


def adapter_for(state: Any, misfits: Misfits | None) -> StateAdapter:
    if is_component(state):
        return ComponentAdapter(misfits)
    if any(located(state, lambda value: not isinstance(value, (dict, list, tuple)) and _is_object(value))):
        return ObjectsAdapter(misfits)
    return TreeAdapter(misfits, is_live=any(located(state, is_torch_tensor)))


def _is_object(value: object) -> bool:
    """Return whether a value must be saved as a graph, that is, as an object rather than a pytree or leaf."""
    graph: Any = _imported("graph")
    if is_versioned(value) or (graph and isinstance(value, (graph.Node, graph.Value, graph.TrackedList))):
        return True
    if "keras" in sys.modules:
        from ..graph import keras_kind

        if keras_kind(value) is not None:
            return True
    if is_python_value(value) or is_jax_array(value) or is_jax_abstract(value) or is_torch_tensor(value):
        return False
    if hasattr(value, "dtype") or is_nnx(value) or expand(value) is not None or DEFAULT_REGISTRY.find(value):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, FunctionType, partial))


def _imported(package: str) -> Any:
    """Return the graph or components package if the program has imported it, or None otherwise."""
    return sys.modules.get(f"{__package__.rpartition('.')[0]}.{package}")


class ObjectsAdapter(StateAdapter):
    """Saves live objects as a graph, and restores them in place if the whole state matches the checkpoint."""

    is_live = True
    needs, modules, lacks = "one torch module in the state", "torch modules", "0 torch modules"

    def __init__(self, misfits: Misfits | None = None) -> None:
        super().__init__(misfits)
        self._holder: Checkpoint | None = None

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        from ..graph import GraphCheckpointHandler

        return GraphCheckpointHandler(compression=options.compression)

    def note_fresh(self, state: Any) -> None:
        for (module, name), problem in _DIVIDED.items() if current_coordinator().process_count > 1 else ():
            kind: Any = getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())
            for path, value in located(state, is_versioned):
                parts = [part for part in (value.modules() if _is_module(value) else [value]) if isinstance(part, kind)]
                if any("NO_SHARD" not in str(getattr(part, "sharding_strategy", "")) for part in parts):
                    raise UnsupportedLeafError(f"{path or 'the state'}: a {name} {problem}")
        super().note_fresh(state)

    def described(self, state: Any) -> FreshObjects:
        from ..graph import FreshObjects

        return FreshObjects.of(self._graph(state))

    def refused(self, state: Any) -> list[str]:
        return list(self._fresh.refused(self.described(state)))

    def to_tree(self, state: Any) -> Any:
        from ..graph import snapshot

        return snapshot(self._graph(state))

    def template(self, state: Any) -> Any:
        return _ObjectsTemplate(self._graph(state), self.misfits)

    def from_tree(self, state: Any, restored: Callable[[], list[str]]) -> Any:
        if changed := restored():
            text = "as at the save, where the program began otherwise: %s"
            announce(text, shortened(changed), shown=current_coordinator().process_index == 0)
        if not isinstance(state, tuple):
            return state
        assert self._holder is not None
        values = self._holder.__holdfast_root__().values()
        return type(state)._make(values) if hasattr(state, "_make") else type(state)(values)

    def is_module(self, value: object) -> bool:
        return _is_module(value)

    def fill(self, path: str, module: Any, source: Place) -> Weights:
        parts = [path] if path else ()
        weights = load_weights(source, dict(module.state_dict()), containers=parts, misfits=self.misfits)
        module.load_state_dict(weights.tree, strict=True)
        return weights

    def _graph(self, state: Any) -> Checkpoint:
        """Return a graph whose root has the parts of the state as its children."""
        from ..graph import Checkpoint, stand_for

        if isinstance(state, Checkpoint):
            return state
        is_tuple = isinstance(state, tuple)
        root = dict(zip(getattr(state, "_fields", range(len(state))), state, strict=True)) if is_tuple else state
        if self._holder is None:
            self._holder = Checkpoint(root=root)
        else:  # reuse the holder, because it records which warnings have been logged
            stand_for(self._holder, root)
        return self._holder


@dataclass(frozen=True)
class _ObjectsTemplate:
    """A template for live objects, which are restored completely or, with ``misfits``, only as far as they match."""

    root: Checkpoint
    misfits: Misfits | None

    def prepare(self, stored: StoredGraph) -> Callable[[], list[str]]:
        """Read and check the saved values. Return a function that applies them and lists changed training flags."""
        from ..graph import Restoration

        restoration = Restoration(stored, self.root, ignore={("save_counter",)}, final=True)
        prepared = restoration.prepare(self.misfits)
        misfits = Misfits() if self.misfits is None else self.misfits
        restoration.report()._note(misfits)
        if self.misfits is None:
            misfits.check(f"{stored.checkpoint}: program and checkpoint differ; nothing was changed:")

        def apply() -> list[str]:
            prepared()
            return restoration.restore_modes() if self.misfits is None else []

        return apply


class ComponentAdapter(StateAdapter):
    """Saves component trees as directories, and restores them in place."""

    is_live = True
    is_component_tree = True
    lacks = "a tree of components without a torch module"

    def handler(self, options: CallbackOptions) -> AsyncCheckpointHandler:
        from ..components import ComponentCheckpointHandler

        return ComponentCheckpointHandler(compression=options.compression)

    def described(self, state: Any) -> dict[str, FreshObjects]:
        from ..components import fresh_components

        return fresh_components(state)

    def refused(self, state: Any) -> list[str]:
        return [
            f"{path}: {line}"
            for path, now in self.described(state).items()
            for line in (self._fresh[path].refused(now) if path in self._fresh else ["not in the fresh state"])
        ]

    def restore_kwargs(self) -> Mapping[str, Any]:
        return {"modes": True} if self.misfits is None else {"misfits": self.misfits}

    def with_weights(self, state: Any, source: Place) -> tuple[Any, str]:
        """Load each torch module's weights from the module's path in `source` or, if missing, from `source` itself."""
        from ..components import modules_of

        modules = modules_of(state)
        if not modules:
            return super().with_weights(state, source)
        checkpoint, loaded = find_checkpoint(as_location(source)), dict[str, Weights]()
        for path, module in modules.items():
            parts = [part for part in (checkpoint / STATE / path, checkpoint / path) if part.is_directory()]
            loaded[path] = load_weights([*parts, source][0], dict(module.state_dict()), misfits=self.misfits)
        for path, module in modules.items():
            module.load_state_dict(loaded[path].tree)
        return state, ", ".join(f"{path} from {weights}" for path, weights in loaded.items())


class VersionCounters:
    """Detects changes to live torch tensors by their version counters, which miss only changes via ``tensor.data``."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._samples: Samples | None = None  # parameter samples at the last step; None if counters detect changes
        self._are_counted: bool | None = None  # whether counters detect changes; None before the first change
        self.has_updated = False  # whether the last step changed a trained parameter
        self._parts: list[Any] = []
        self._tensors: dict[str, Any] = {}
        self._noted: list[int] = []  # tensor versions at the last step
        self._gradient: tuple[Callable[[], Any], int] = (lambda: None), 0  # last new gradient and its version counter
        self._has_new_gradient = False

    def watch(self, roots: Mapping[str, Any]) -> None:
        """Find the tensors in ``roots``, and record their version counters."""
        self._tensors = named_tensors(roots)
        self._noted, self._samples = self._now(), self._sample()

    def note_step(self, roots: Mapping[str, Any]) -> None:
        parts = [part for root in roots.values() for _, part in located(root, _is_watched)]
        if len(parts) != len(self._parts) or any(map(operator.is_not, parts, self._parts)):
            versions = dict(zip(map(id, self._tensors.values()), self._noted, strict=True))
            self.watch(roots)  # search for tensors again only if the parts have changed
            self._parts, self._noted = parts, [versions.get(id(tensor), -1) for tensor in self._tensors.values()]
        before, self._noted = self._noted, self._now()
        steps = zip(self._tensors.values(), before, self._noted, strict=True)
        self.has_updated = any(old != new and tensor.requires_grad for tensor, old, new in steps)
        if self.has_updated:
            self._are_counted, self._samples = True, None
        elif not self._are_counted:
            last, self._samples = self._samples, self._sample()
            self.has_updated = last is not None and last.differs(self._samples)
            self._are_counted = False if self.has_updated else self._are_counted
        # A gradient that has not changed since the previous step is not new: an optimizer may already have used it.
        gradients = (tensor.grad for tensor in self._tensors.values() if tensor.is_leaf)
        gradient: Any = next((each for each in gradients if each is not None), None)
        tensor, version = self._gradient
        self._has_new_gradient = gradient is not None and (tensor() is not gradient or version != gradient._version)
        if self._has_new_gradient:
            self._gradient = weakref.ref(gradient), gradient._version

    def new_gradients(self) -> list[str]:
        """Return the names of parameters that received new gradients in the last step. This may wait for a device."""
        tensors = self._tensors.items() if self._has_new_gradient else ()
        leaves = [(name, tensor.grad) for name, tensor in tensors if tensor.is_leaf]
        return [name for name, gradient in leaves if gradient is not None and _is_usable(gradient)]

    def why_lost(self) -> str | None:
        """Return why the tensors of the last step can no longer be saved, or None if they have not changed since."""
        before = self._samples if self._are_counted is False else None
        if (before is not None and before.differs(self._sample())) or self._now() != self._noted:
            again = "once more after forward passes at the end, such as those of micro-batches that are left"
            return f"its tensors were changed since; call on_step after every update, and {again}"
        return None

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors.values()]

    def _sample(self) -> Samples:
        with contextlib.suppress(Exception):  # without samples, changes are detected by the counters alone
            return self._sampler.take([tensor for tensor in self._tensors.values() if tensor.requires_grad][:_SAMPLED])
        return Samples(0)


def _is_usable(gradient: Any) -> bool:
    """Return whether an optimizer would use a gradient, that is, whether it is finite and not all zeros."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    values = local.coalesce().values() if local.is_sparse else local
    return bool(values.any()) and bool(values.isfinite().all())


def set_gradients(state: Any, gradients: Mapping[str, Any]) -> list[str]:
    """Restore accumulated gradients, and return the names of gradients whose parameters no longer exist."""
    tensors = named_tensors(state)
    for name, gradient in gradients.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.requires_grad and tensor.shape == gradient.shape:
            tensor.grad = gradient.to(tensor.device)
    return [name for name, gradient in gradients.items() if name not in tensors or tensors[name].grad is None]


def named_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors that have version counters, keyed by the first path to each."""
    torch: Any = loaded("torch")
    named: dict[int, tuple[str, Any]] = {}
    for name, value in live_objects(state):
        below: Iterable[tuple[Any, Any]] = ()
        if _is_module(value):
            below = chain(value.named_parameters(), value.named_buffers())
        elif isinstance(value, torch.optim.Optimizer):
            below = enumerate(parameter for group in value.param_groups for parameter in group["params"])
        tensors = [(name, value)] if is_torch_tensor(value) else [(f"{name}.{key}", tensor) for key, tensor in below]
        for path, tensor in tensors:
            if not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) and not tensor.is_inference():
                named.setdefault(id(tensor), (path, tensor))
    return dict(named.values())


def live_objects(state: Any) -> Iterator[tuple[str, Any]]:
    """If torch is loaded, yield the live objects in a state and all values inside them, each with its first path."""
    seen: set[int] = set()
    for root in located(state, _is_watched) if loaded("torch") is not None else ():
        queue = [root]
        for name, value in queue:
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield name, value
            library = type(value).__module__.partition(".")[0]
            below: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, dict):
                below = value.items()
            elif isinstance(value, (list, tuple)):
                below = enumerate(value)
            elif not (is_torch_tensor(value) or is_versioned(value) or library in _FOREIGN):
                below = getattr(value, "__dict__", {}).items()
            queue += [(f"{name}.{key}", part) for key, part in below if not is_python_value(part)]


def sharded_modules(root: Any) -> list[Any]:
    """Return the FSDP2 modules in a state; after a forward pass alone, they show whole parameters until `reshard`."""
    modules = chain(*(module.modules() for _, module in located(root, _is_module)))
    return [module for module in modules if derives(module, "FSDPModule", "torch.")]


def _is_module(value: object) -> bool:
    torch: Any = loaded("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    from ..graph import is_module

    return is_module(value)


def _is_watched(value: object) -> bool:
    return is_component(value) or _is_object(value) or is_torch_tensor(value) or hasattr(value, "load_state_dict")

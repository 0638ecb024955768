"""What a torch optimizer keeps: values for each parameter, and options for each group of parameters.

Both belong to parameters, never to numbers: another order of modules or of groups does not swap them.
"""

from __future__ import annotations

from typing import Any

from ..stateful import decode_state, encode_state
from ..tree.frameworks import is_torch_tensor
from ..tree.python_leaves import is_python_value
from .paths import Path

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how an optimizer computes, not what; they depend on the devices of the program."""


class OptimizerView:
    """A torch optimizer, seen as values of parameters.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def groups(self) -> list[list[Any]]:
        """Returns the parameters, group by group."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def options(self, group: int) -> dict[str, Any]:
        """Returns the options of a group by name, such as its learning rate, without those that are the program's."""
        options = self.optimizer.param_groups[group].items()
        return {name: value for name, value in options if not name.startswith("param") and name not in _IMPLEMENTATION}

    def option_cell(self, group: int, name: str) -> OptionCell:
        """Returns the place of an option, whether it is there yet or not."""
        return OptionCell(self.optimizer, group, name)

    def group_by_parameter(self) -> dict[int, dict[str, Any]]:
        """Returns the group that every parameter is in, by the parameter's id."""
        return {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}

    def slots(self, parameter: Any) -> dict[str, Any]:
        """Returns what is kept for a parameter by name; nothing before the first step."""
        return dict(self.optimizer.state.get(parameter, {}))

    def slot_cell(self, parameter: Any, name: str) -> SlotCell:
        """Returns the place of what is kept for a parameter, whether it is there yet or not."""
        return SlotCell(self.optimizer, parameter, name)


class SlotCell:
    """The place of one value that an optimizer keeps for a parameter.

    Attributes:
        anchor: The parameter.
        trail: Where this is, seen from there.
    """

    def __init__(self, optimizer: Any, parameter: Any, name: str) -> None:
        self.optimizer = optimizer
        self.anchor = parameter
        self.name = name
        self.trail: Path = (str(id(optimizer)), name)

    def get(self) -> Any:
        """Returns the value; of lists and the like a snapshot, ``...`` where there is none yet."""
        state = self.optimizer.state.get(self.anchor, {})
        value = state.get(self.name, ...)
        return value if value is ... or is_simple(value) else encode_state(value)

    def set(self, value: Any) -> None:
        """Changes the value; what was not kept before is kept from now on."""
        self.optimizer.state[self.anchor][self.name] = decode_state(value)


class OptionCell:
    """The place of one option of a group."""

    def __init__(self, optimizer: Any, group: int, name: str) -> None:
        self.anchor = optimizer
        self.trail: Path = ("groups", str(group), name)
        self._options = optimizer.param_groups[group]
        self._name = name

    def get(self) -> Any:
        """Returns the value; ``...`` where there is none yet."""
        value = self._options.get(self._name, ...)
        return value if value is ... or is_simple(value) else encode_state(value)

    def set(self, value: Any) -> None:
        """Changes the value; a tensor stays the tensor that it is."""
        old = self._options.get(self._name)
        if is_torch_tensor(old) and is_torch_tensor(value):
            old.detach().copy_(value)
        else:
            self._options[self._name] = decode_state(value)


def is_simple(value: object) -> bool:
    """Whether a value is one leaf; lists of tensors and the like are trees."""
    return is_torch_tensor(value) or is_python_value(value)

"""Trees changed into the shape of others: renamed, merged, split, completed."""

from __future__ import annotations

from typing import Any

from ..errors import TreeMismatchError
from .flatten import flatten
from .frameworks import is_jax_abstract, is_jax_array, is_torch_tensor
from .structure import unflatten
from .transform import Transform as Transform
from .transform_plan import Call, Computed, OriginalTree, Taken, explained, path_of, plan


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool = True
) -> Any:
    r"""Makes a tree of the new tree's structure with values of the original one.

    Where the value of a key comes from:

    - A `Transform` whose key matches says so. Keys are paths such as ``params/Dense_0``, written with ``/`` or as
      dictionaries inside dictionaries, or regular expressions that match a path from end to end. They are matched with
      the paths of the new tree, as errors and ``holdfast show`` print them. One that matches a container applies to all
      leaves below it: ``original_key`` is the corresponding container then, and ``multi_value_fn`` returns a tree that
      has these leaves. If several match a leaf, a key that is written out goes before a pattern, a longer path before
      that of a container above, and the first before those after it.
    - A key that no transformation names, and that is in both trees, comes from the original tree, or from the new one
      if ``default_to_original`` is False.
    - A key that only the new tree has keeps its value there; one that only the original tree has is dropped.

    Leaves of the new tree may be ``...``: a placeholder, which may also be filled with a whole container. None in a
    tree is no value: it stays None in the new tree, and is not taken from the original.

    Values are handed on as they are, neither cast, compared nor copied; a value that two keys take is shared by both.

    Args:
        original_tree: Any tree. Its containers need not be of the same types as those of the new one: what was loaded
            without a template, as dictionaries, will do.
        transformations: `Transform` objects by their keys.
        new_tree: What the result shall look like; its values matter only where they are kept.
        default_to_original: Which tree is preferred, as above. Transformations with ``use_fallback`` take from the
            other.

    Returns:
        A tree of the new tree's containers.

    Raises:
        OptionError: A transformation is none, matches no key of the new tree, or refers to a group it does not have.
        TreeMismatchError: Keys have no value, or one that is not of the new tree's structure; names all of them.

    >>> renamed = {"x": Transform(original_key="b/c")}
    >>> apply_transformations({"a": 1, "b": {"c": 2}}, renamed, {"a": ..., "x": ..., "y": 5})
    {'a': 1, 'x': 2, 'y': 5}
    """
    original = flatten(original_tree)
    new = flatten(new_tree)
    known = OriginalTree(original.names, original.structure, [value is None for value in original.values])
    origins = plan(known, transformations, new, default_to_original)
    results: dict[Call, dict[str, Any]] = {}
    values: list[Any] = []
    for name, old, origin in zip(new.names, new.values, origins, strict=True):
        value = old
        if isinstance(origin, Taken):
            part = original.values[origin.start : origin.stop]
            value = transformed(origin, unflatten(origin.container, part), name, old)
        elif isinstance(origin, Computed):
            if origin.call not in results:
                results[origin.call] = parts(origin.call, origin.call.run(original_tree), old is ...)
            value = results[origin.call][origin.name]
        values.append(value)
    return unflatten(new.structure, values)


def transformed(origin: Taken, value: Any, name: str, old: Any) -> Any:
    """Hands a value of the original tree on, through the transformation's function if it has one.

    Args:
        origin: Where the value comes from.
        value: The value.
        name: Of the leaf in the new tree.
        old: The leaf there.

    Raises:
        TreeMismatchError: The function returns a container for a leaf that is no placeholder.
    """
    function = origin.function
    if function is None:
        return value
    path = path_of(name)
    result = explained(lambda: function(value), "value_fn", path)
    _check_leaf(result, path, old is ..., "value_fn")
    return result


def parts(call: Call, result: Any, placeholder: bool) -> dict[str, Any]:
    """Takes apart what a function of the whole tree returns.

    Args:
        call: The function.
        result: What it returned.
        placeholder: Whether the leaf that is asked for is ``...``.

    Returns:
        Its parts by the names that the call has to make.

    Raises:
        TreeMismatchError: The parts are not those of the new tree.
    """
    if call.names == [""]:
        _check_leaf(result, call.path, placeholder, "multi_value_fn")
        return {"": result}
    found = flatten(result)
    known = dict(zip(found.names, found.values, strict=True))
    missing = [f"{path_of(name)}: not returned" for name in call.names if name not in known]
    if missing:
        raise TreeMismatchError(
            f"multi_value_fn of the transformation for {call.path or '(root)'} has to return a tree with the keys that "
            "the new tree has there:",
            missing,
        )
    return known


def _check_leaf(result: Any, path: str, placeholder: bool, what: str) -> None:
    if not placeholder and flatten(result).structure is not None:
        raise TreeMismatchError(
            f"{what} of the transformation for {path or '(root)'} returned a {type(result).__name__}: expected one "
            "value, as the new tree has a leaf there; write ... in the new tree to take whatever is returned"
        )


def has_values(leaf: Any) -> bool:
    """Whether a leaf of a template has values: not those that are only a shape and a dtype, or deleted."""
    if is_jax_abstract(leaf):
        return False
    if is_jax_array(leaf):
        return not leaf.is_deleted()
    return not (is_torch_tensor(leaf) and leaf.is_meta)

"""The JSON files that Orbax writes beside its arrays: the tree, kinds of values, shardings, strings.

What is missing in them is taken to have the value it had before Orbax began to write it. Facts about the format are
those of orbax-checkpoint 0.5 to 0.12.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
from typing import Any, NamedTuple

from ..errors import DamagedCheckpointError
from ..storage import Location
from ..tree import Details
from .containers import Path
from .files import read_object, read_optional

TREE_FILE = "_METADATA"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
STRINGS_FILE = "_strings.json"
SHARDING_FILE = "_sharding"
ARRAYS_FOLDER = "array_metadatas"

EMPTY_KINDS = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
"""Value types of containers without leaves, and what each becomes."""
NONE = "None"
STRING = "string"
WITHOUT_DATA = "placeholder"
SCALAR = "scalar"
_SEQUENCE_KEY = 1


class Parameter(NamedTuple):
    """One entry of the tree: a leaf, or a container without leaves.

    Attributes:
        path: Its keys; int for places in lists and tuples.
        value_type: What Orbax calls its kind: ``"jax.Array"``, ``"np.ndarray"``, ``"scalar"``, ``"string"``, ...
    """

    path: Path
    value_type: str

    @property
    def name(self) -> str:
        """What Orbax calls it, and stores it as: two parameters may have the same."""
        return ".".join(map(str, self.path))


class TreeMetadata(NamedTuple):
    """What ``_METADATA`` says.

    Attributes:
        parameters: The entries of the tree, in the order of the file.
        use_zarr3: Whether arrays are zarr version 3 instead of 2.
        complete: Whether every chunk is stored, also those that hold nothing but the fill value.
        uses_ocdbt: Whether all arrays are said to be in one database.
    """

    parameters: list[Parameter]
    use_zarr3: bool
    complete: bool
    uses_ocdbt: bool = False


def read_tree(folder: Location) -> TreeMetadata:
    """Reads the structure of the tree in a folder.

    Raises:
        DamagedCheckpointError: The file is missing, or does not describe a tree.
    """
    place = folder / TREE_FILE
    document = read_object(place)
    entries = document.get("tree_metadata")
    if not isinstance(entries, dict):
        raise DamagedCheckpointError(f"{place} is damaged: it has no tree_metadata")
    parameters = []
    for text, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        value = fields.get("value_metadata")
        kind = value.get("value_type") if isinstance(value, dict) else None
        path = _path(fields.get("key_metadata"), text)
        if path is None:
            raise DamagedCheckpointError(f"{place} is damaged: the entry {text:.200} has no keys that make sense")
        parameters.append(Parameter(path, kind if isinstance(kind, str) else "unknown"))
    complete = document.get("store_array_data_equal_to_fill_value") is True
    return TreeMetadata(parameters, document.get("use_zarr3") is True, complete, document.get("use_ocdbt") is True)


def _path(keys: Any, text: str) -> Path | None:
    """Returns the path of an entry, out of its list of keys or else out of its name, the text of a tuple."""
    if keys is None:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if not isinstance(found, tuple) or not all(isinstance(key, str | int) for key in found):
            return None
        return tuple(str(key) for key in found)
    if not isinstance(keys, list):
        return None
    path: list[str | int] = []
    for key in keys:
        name = key.get("key") if isinstance(key, dict) else None
        if not isinstance(name, str | int) or isinstance(name, bool):
            return None
        number = str(name)
        is_index = key.get("key_type") == _SEQUENCE_KEY and number.isascii() and number.isdigit() and len(number) < 10
        path.append(int(number) if is_index else number)
    return tuple(path)


def read_key_kinds(folder: Location) -> dict[str, str]:
    """Returns the names of the arrays that are typed PRNG keys, each with its implementation."""
    found: dict[str, str] = {}
    for entry in (folder / ARRAYS_FOLDER).entries():
        if entry.is_directory or not entry.name.startswith("process_"):
            continue
        listed = read_optional(folder / ARRAYS_FOLDER / entry.name).get("array_metadatas")
        for item in listed if isinstance(listed, list) else ():
            array = item.get("array_metadata") if isinstance(item, dict) else None
            extra = array.get("ext_metadata") if isinstance(array, dict) else None
            kind = extra.get("random_key_impl") if isinstance(extra, dict) else None
            name = array.get("param_name") if isinstance(array, dict) else None
            if isinstance(kind, str) and isinstance(name, str):
                found[name] = kind
    return found


def read_strings(folder: Location) -> dict[str, Any]:
    """Returns the strings of a tree; :func:`find_string` looks one up."""
    return read_optional(folder / STRINGS_FILE)


def find_string(strings: dict[str, Any], name: str) -> str | None:
    """Looks up a string by its name, which Orbax uses as a JSON pointer; None where there is none."""
    found: Any = strings
    for token in name.split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found if isinstance(found, str) else None


def read_shardings(folder: Location) -> dict[str, Details]:
    """Returns how arrays were spread over devices, as far as that can be told; by the names of the arrays."""
    found = {}
    for encoded, text in read_optional(folder / SHARDING_FILE).items():
        try:
            name = base64.urlsafe_b64decode(encoded).decode("utf-8")
            details = _sharding(json.loads(text))
        except (ValueError, TypeError, RecursionError, binascii.Error):
            continue  # it is only for people to look at
        if details is not None:
            found[name] = details
    return found


def _sharding(fields: Any) -> Details | None:
    if not isinstance(fields, dict) or not isinstance(fields.get("sharding_type"), str):
        return None
    kind = fields["sharding_type"]
    if kind == "NamedSharding":
        names, sizes, spec = fields.get("axis_names"), fields.get("shape"), fields.get("partition_spec")
        if not isinstance(names, list) or not isinstance(sizes, list) or len(names) != len(sizes):
            return None
        axes = [[str(name), size] for name, size in zip(names, sizes, strict=True)]
        return {"type": kind, "mesh": {"axes": axes}, "spec": spec}
    device = fields.get("device_str")
    return {"type": kind, "device": device} if isinstance(device, str) else {"type": kind}

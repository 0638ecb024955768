"""holdfast saves and resumes machine-learning training runs.

>>> import tempfile, numpy as np
>>> import holdfast as hf
>>> with tempfile.TemporaryDirectory() as directory:
...     report = hf.save(f"{directory}/ckpt", {"w": np.arange(3), "step": 7})
...     hf.load(f"{directory}/ckpt")
{'w': array([0, 1, 2]), 'step': 7}
"""

import contextlib as _contextlib
import importlib as _importlib
import os as _os
import sys as _sys

import lazy_loader as _lazy_loader

from .engine import __version__ as __version__

try:
    import fcntl as _fcntl  # noqa: F401
except ImportError:
    raise ImportError(
        "holdfast runs on Linux and macOS: this Python has no fcntl, without which files cannot be locked. On Windows, "
        "run it in WSL 2 (wsl --install), with checkpoints on the disk of Linux"
    ) from None

# Warn if another project's distribution named `holdfast` is installed, because its modules would mix with ours.
for _place in _sys.path:
    with _contextlib.suppress(OSError):
        for _name in _os.listdir(_place):
            if _name.startswith("holdfast-") and _name[9:10].isdigit() and _name.endswith(".dist-info"):
                _importlib.import_module("holdfast.engine.installed").tell_of_stranger(_os.path.join(_place, _name))

# Public names, listed in __init__.pyi, are loaded on first use, which keeps importing the package cheap.
_load, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in __all__ if name != "open"]  # keep `from holdfast import *` from shadowing the built-in
_MODULES = ("errors", "handlers", "type_handlers", "reports", "processes", "storage", "clock", "observer")


def __getattr__(name):  # type checkers read __init__.pyi
    """Load a public name on first use. If a submodule has the name instead, the error names the submodule."""
    try:
        return _load(name)
    except AttributeError:
        for module in _MODULES if not name.startswith("_") else ():
            if name in _importlib.import_module(f"holdfast.{module}").__all__:
                where = f"holdfast.{module}.{name}"
                raise AttributeError(f"module 'holdfast' has no attribute {name!r}; it is {where}") from None
        # With name and obj set, the traceback suggests the closest public name.
        hint = _instead_of(name)
        here = {} if hint else {"name": name, "obj": _sys.modules[__name__]}
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}{hint}", **here) from None


def _instead_of(name):
    """Return a hint about holdfast's counterpart of an Orbax name, for appending to an error message."""
    return _importlib.import_module("holdfast.engine.foreign_arguments").object_instead_of(name)


class _PeerModules:
    """A module finder that adds hints for Orbax modules, because ``import holdfast.v1`` bypasses ``__getattr__``."""

    @staticmethod
    def find_spec(name, *_):
        package, _, module = name.rpartition(".")
        if package == __name__ and (hint := _instead_of(module)):
            # With name=, `from holdfast import args` would replace this error with one that lacks the hint.
            raise ModuleNotFoundError(f"No module named {name!r}{hint}")


_sys.meta_path.append(_PeerModules)

"""Systems that lack what Linux has: a fallback, or one clear error at import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MACOS = """
import fcntl, json, os, sys
import numpy as np

for name in ("preadv", "pwritev", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "O_DIRECT"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "darwin"
fcntl.F_FULLFSYNC = 51
done, order, real, real_replace = [], fcntl.fcntl, os.fsync, os.replace

def at(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return "directory" if os.path.isdir(path) else "temporary" if ".holdfast-" in path else os.path.basename(path)

def control(descriptor, request, *arguments):
    if request != fcntl.F_FULLFSYNC:
        return order(descriptor, request, *arguments)
    done.append(["drive", at(descriptor)])

def sync(descriptor):
    done.append(["file", at(descriptor)])
    real(descriptor)

def replace(source, target):
    done.append(["name", os.path.basename(target)])
    real_replace(source, target)

fcntl.fcntl, os.fsync, os.replace = control, sync, replace

import holdfast as hf

tree = {"w": np.arange(3_000_000.0), "step": 7}
hf.save(sys.argv[1] + "/one", tree)
loaded = hf.load(sys.argv[1] + "/one")
assert loaded["w"].tobytes() == tree["w"].tobytes() and loaded["step"] == 7
one = list(done)
with hf.CheckpointManager(sys.argv[1] + "/run", options=hf.CheckpointManagerOptions(max_to_keep=2)) as manager:
    for step in range(4):
        manager.save(step, tree)
assert hf.verify(sys.argv[1] + "/run").ok
print(json.dumps(one))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_macos_saves_and_loads_and_has_the_drive_write_the_record_after_everything_else(tmp_path: Path) -> None:
    ended = run(MACOS, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    done = [tuple(one) for one in json.loads(ended.stdout)]
    named = done.index(("name", "checkpoint.json"))
    assert done[named - 1 : named + 2] == [("drive", "temporary"), ("name", "checkpoint.json"), ("drive", "directory")]
    synced = [name for kind, name in done[: named - 1] if kind == "file"]
    assert {"manifest.ocdbt", "tree.json", "directory"} < set(synced)
    assert not any(kind == "file" for kind, _ in done[named - 1 :]), "everything is synced before the record is written"


def test_windows_is_told_at_import_what_is_supported() -> None:
    ended = run("import sys; sys.modules['fcntl'] = None; import holdfast")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: holdfast runs on Linux and macOS: ")
    assert "WSL 2" in ended.stderr

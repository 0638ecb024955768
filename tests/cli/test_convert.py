from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from tests.cli.commands import Cli
from tests.manager.runs import saved

import holdfast as hf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    checkpoint = {
        "state_dict": {"w": torch.ones(2, 3)},
        "pytorch-lightning_version": "2",
        "global_step": 5,
        "hyper_parameters": {"f": print},
    }
    torch.save(checkpoint, tmp_path / "model.ckpt")
    return tmp_path / "model.ckpt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saved(tmp_path / "run" / "checkpoints", 1, 2, items=weights, metrics=lambda step: {"loss": step})
    return tmp_path / "run"


def weights(step: int) -> dict[str, Any]:
    return {"w": np.full(3, step)}


LEFT_OUT = "hyper_parameters/f (the class or function builtins.print)"


def test_import(cli: Cli, model: Path) -> None:
    target = model.parent / "ckpt"
    lines = cli.output("import", model, target).splitlines()
    assert lines == [f"{model} -> {target}: 3 leaves, 32 B (Lightning)", f"  left out: {LEFT_OUT}"]
    assert hf.load(target)["state_dict"]["w"].shape == (2, 3)
    (found,) = cli.json("import", model, target, "--overwrite")["checkpoints"]
    about = {"source": str(model), "path": str(target), "format": "Lightning", "step": None}
    assert found == {**about, "leaves": 3, "bytes": 32, "left_out": [LEFT_OUT]}
    shown = cli.output("show", model)
    assert "state_dict/w" in shown
    assert shown.endswith("32 B, written by Lightning\n")
    assert cli.output("verify", model).splitlines()[-1] == "1 whole"
    (listed,) = cli.json("ls", model)["checkpoints"]
    assert (listed["step"], listed["damage"]) == (5, None)


def test_the_directory_of_a_run_is_imported(cli: Cli, model: Path, run: Path) -> None:
    trained = model.parent / "version_0"
    (trained / "checkpoints").mkdir(parents=True)
    model.rename(trained / "checkpoints" / "epoch=0-step=5.ckpt")

    said = cli.error("rm", trained, 5, "--yes", status=2)
    assert "Lightning wrote these checkpoints; holdfast changes only its own" in said
    assert "(Lightning)" in cli.output("import", trained, model.parent / "imported")
    assert hf.load(model.parent / "imported")["global_step"] == 5
    said = cli.error("import", run, model.parent / "other", status=2)
    assert said == f"holdfast: {run} is holdfast's own; holdfast cp copies it\n"


def test_import_refuses(cli: Cli, model: Path, run: Path) -> None:
    exists = cli.error("import", model, run, status=2)
    assert "exists already" in exists
    assert "pass --overwrite" in exists
    assert "no such directory" in cli.error("import", "/nonexistent", run / "x", status=2)
    model.write_bytes(model.read_bytes()[:-10])
    assert "cannot be read as a torch.save file" in cli.error("import", model, run / "x", status=1)


def test_a_part_is_exported(cli: Cli, model: Path) -> None:
    target = model.parent / "part.safetensors"
    cli.output("export", model, target, "--select", "state_dict/w", "--select", "**/global_step")
    assert hf.load(target).keys() == {"state_dict", "global_step"}
    said = cli.error("export", model, target, "--overwrite", "--select", "state_dict/v", status=1)
    assert "--select 'state_dict/v' matches no leaf" in said
    assert "did you mean 'state_dict/w'?" in said


def test_export_of_the_newest_of_a_step_or_of_all(cli: Cli, run: Path) -> None:
    target = run.parent / "x.safetensors"
    line = cli.output("export", run, target)
    assert line == f"{run}/checkpoints/2 -> {target}: 1 leaf, 24 B (safetensors)\n"
    assert safetensors.numpy.load_file(target)["w"].tolist() == [2, 2, 2]
    cli.output("export", run, run.parent / "x.pt", "--to", "torch", "--step", 1)
    assert torch.load(run.parent / "x.pt", weights_only=True)["w"].tolist() == [1, 1, 1]
    assert len(cli.output("export", run, run.parent / "orbax", "--to", "orbax").splitlines()) == 2
    with ocp.CheckpointManager(run.parent / "orbax") as manager:
        assert sorted(manager.all_steps()) == [1, 2]


def test_export_of_the_best_step(cli: Cli, tmp_path: Path, run: Path) -> None:
    best: dict[str, Any] = {"best_fn": "loss", "best_mode": "min", "max_to_keep": 3}
    saved(tmp_path / "ranked", 1, 2, 3, items=weights, metrics=lambda step: {"loss": abs(step - 2.1)}, **best)
    assert "ranked/2" in cli.output("export", tmp_path / "ranked", tmp_path / "best.safetensors", "--step", "best")
    assert safetensors.numpy.load_file(tmp_path / "best.safetensors")["w"].tolist() == [2, 2, 2]
    said = cli.error("export", run, tmp_path / "x.pt", "--step", "best", status=2)
    assert "does not rank its checkpoints by the name of a metric" in said
    assert not (tmp_path / "x.pt").exists()


def test_export_in_place(cli: Cli, run: Path) -> None:
    lines = cli.output("export", run, "--to", "orbax", "--in-place").splitlines()

    assert lines == [f"{run}/checkpoints/{step}: orbax can now read it, too" for step in (1, 2)]
    found = cli.json("export", run, "--to", "orbax", "--in-place", "--step", "2")
    assert found == {"checkpoints": [f"{run}/checkpoints/2"]}
    with ocp.StandardCheckpointer() as checkpointer:
        template = {"w": np.zeros(3, np.int64)}
        assert checkpointer.restore(run / "checkpoints" / "2" / "state", template)["w"].tolist() == [2, 2, 2]
    assert cli.output("verify", run).splitlines()[-1] == "2 whole"


EXPORT_ERRORS = {  # what follows the name of a run: what is said
    "x --to onnx": "is not one of 'safetensors', 'orbax', 'torch', 'dcp'",
    "": "DST is missing: give the file or directory to write",
    "--in-place": "--in-place takes --to orbax",
    "x --to orbax --in-place": "--in-place takes --to orbax",
    "--to orbax --in-place --step best": "--in-place takes the number of a step, not",
    "x.pt --step 9": "no checkpoint of step 9",
    "x.pt --step first": "'first' is neither a step number nor best",
    "x.pt --item y": "no tree 'y'; it has state",
    "out": "use one of .safetensors, .pt, .pth, .ckpt, or --to orbax",
    "out.npz": "use one of .safetensors, .pt, ",
    "out.pt --to safetensors": "--to 'safetensors' does not fit ",
    "out.safetensors --to torch": "--to 'torch' does not fit ",
    "there.safetensors": "choose another name, or pass --overwrite\n",
}


@pytest.mark.parametrize("arguments", EXPORT_ERRORS)
def test_export_refuses(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.chdir(run.parent)
    Path("there.safetensors").touch()
    assert EXPORT_ERRORS[arguments] in cli.error("export", run, *arguments.split(), status=2)
    if "--overwrite" in EXPORT_ERRORS[arguments]:
        cli.output("export", run, *arguments.split(), "--overwrite")


def test_export_asks_for_an_item(cli: Cli, tmp_path: Path) -> None:
    items = {name: hf.PyTreeCheckpointer() for name in ("ema", "extras")}
    with hf.CheckpointManager(tmp_path / "run", items) as manager:
        manager.save(1, {"ema": {"w": 1}, "extras": {}})

    said = cli.error("export", tmp_path / "run", tmp_path / "x.safetensors", status=2)
    assert said.endswith("has the trees ema, extras: name one with --item\n")
    said = cli.error("export", tmp_path / "run", tmp_path / "x.pt", "--item", "ema", "--root", "v", status=2)
    assert "--root 'v'" in said
    assert said.endswith("has no such container; it has w\n")


def test_copy_a_run(cli: Cli, run: Path, place: str) -> None:
    lines = cli.output("cp", run, place).splitlines()
    again = cli.json("cp", run, place, "--max-bandwidth", "1 GB/s")["checkpoints"]
    one = cli.output("cp", f"{place}/2", run.parent / "copy")

    sources = [str(run / "checkpoints" / step) for step in ("1", "2")]
    assert [line.partition(" -> ")[0] for line in lines] == sources
    assert again == [
        {"source": source, "path": f"{place}/{step}", "step": step, "bytes": again[0]["bytes"], "sent": 0}
        for step, source in enumerate(sources, 1)
    ]
    assert one.startswith(f"{place}/2 -> {run.parent}/copy: ")
    assert hf.load(run.parent / "copy")["w"].tolist() == [2, 2, 2]
    assert hf.verify(place).ok


def test_copy_nothing_over_another_checkpoint(cli: Cli, run: Path) -> None:
    hf.save(run.parent / "copy", {"w": 1})
    source = run / "checkpoints" / "1"

    message = cli.error("cp", source, run.parent / "copy", status=2)
    assert message.endswith("another checkpoint is there; choose another path, or replace it (--overwrite)\n")
    cli.output("cp", source, run.parent / "copy", "--overwrite")
    assert hf.load(run.parent / "copy")["w"].tolist() == [1, 1, 1]
    message = cli.error("cp", source, run.parent / "more", "--max-bandwidth", "fast", status=2)
    assert "--max-bandwidth 'fast' is not a rate" in message


def test_the_weights_of_a_loop_have_the_names_of_their_module(cli: Cli, tmp_path: Path) -> None:
    """As ``from_pretrained`` of other libraries reads them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with hf.CheckpointCallback(tmp_path / "run") as checkpoint:
        checkpoint.restore_or_initialize(state, epoch=0)
        checkpoint.on_step(1, state, epoch=1)
    cli.output("export", tmp_path / "run", tmp_path / "model.safetensors", "--root", "model")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    model.load_state_dict(found)
    hf.export_checkpoint(tmp_path / "run", tmp_path / "part.pt", "torch", root="model/0", select="weight")
    part = torch.load(tmp_path / "part.pt", weights_only=True)
    assert part.keys() == {"weight"}
    assert torch.equal(part["weight"], model.state_dict()["0.weight"])


def test_the_end_of_the_name_decides_the_format(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hf.save("one", {"w": torch.ones(2)})
    assert "(safetensors)" in cli.output("export", "one", "out.safetensors")
    for arguments in ("out.pt", "out.ckpt", "out.bin --to torch", "out --to torch", "other.pt --to torch"):
        name, *options = arguments.split()
        assert "(torch)" in cli.output("export", "one", name, *options)
        assert torch.load(name, weights_only=True)["w"].tolist() == [1, 1]

"""Directories with the checkpoints of another run: no writer begins beside them, and an import makes them its own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.serialization import to_bytes
from flax.training.train_state import TrainState
from tests.integrations.states import bits

import holdfast as hf
from holdfast import graph
from holdfast.integrations.flax import CheckpointCallback

optax: Any = pytest.importorskip("optax")
ocp: Any = pytest.importorskip("orbax.checkpoint")

TENSORFLOW = Path(__file__).parents[1] / "formats" / "tensorflow" / "guide"
MODEL: Any = nn.Dense(3)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def fresh() -> Any:
    create: Any = TrainState.create
    params = MODEL.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    return create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def trained(updates: int) -> Any:
    state = fresh()
    for number in range(updates):
        state = state.apply_gradients(grads=jax.tree.map(lambda leaf, n=number: jnp.full_like(leaf, n), state.params))
    return state


# ---- runs of other programs


def by_orbax(place: Path, **options: Any) -> None:
    options = {"best_fn": lambda metrics: metrics["loss"], "max_to_keep": 2, **options}
    settings = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
    with ocp.CheckpointManager(place, options=settings, metadata={"data": "digits", "rate": 0.1}) as manager:
        for step in (1, 2):
            manager.save(
                step,
                args=ocp.args.StandardSave(trained(step)),
                metrics={"loss": step / 4},
                custom_metadata={"epoch": step},
            )


def by_orbax_with_a_prefix(place: Path) -> None:
    by_orbax(place, step_prefix="ckpt", step_format_fixed_length=6)


def by_flax(place: Path) -> None:
    place.mkdir()
    for step in (1, 2):
        (place / f"checkpoint_{step}").write_bytes(to_bytes(trained(step)))


def by_lightning(place: Path) -> None:
    place.mkdir()
    layer = torch.nn.Linear(2, 3)
    for step, name in ((1, "epoch=0-step=1.ckpt"), (2, "epoch=1-step=2.ckpt"), (2, "last.ckpt")):
        content = {"pytorch-lightning_version": "2.6.1", "global_step": step, "state_dict": layer.state_dict()}
        torch.save(content, place / name)


def by_tensorflow(place: Path) -> None:
    shutil.copytree(TENSORFLOW, place)


def with_another_prefix(place: Path) -> None:
    with hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(step_prefix="model")) as manager:
        manager.save(2, {"w": np.arange(3)})


OTHERS: dict[Callable[[Path], None], str] = {
    by_orbax: "2 checkpoints of Orbax, the newest 2 of step 2",
    by_orbax_with_a_prefix: "2 checkpoints of Orbax, the newest ckpt_000002 of step 2",
    by_flax: "2 checkpoints of Flax, the newest checkpoint_2 of step 2",
    by_lightning: "2 checkpoints of Lightning, the newest epoch=1-step=2.ckpt of step 2",
    by_tensorflow: "3 checkpoints of TensorFlow, the newest ckpt-5 of step 5",
    with_another_prefix: "1 checkpoint with another name, the newest model_2",
}


# ---- programs of ours


def a_manager(place: Path) -> None:
    hf.CheckpointManager(place)


def a_callback(place: Path) -> None:
    with CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        checkpoint.restore_or_initialize(fresh())


def a_graph(place: Path) -> None:
    graph.CheckpointManager(graph.Checkpoint(w=graph.Value(1)), place, max_to_keep=3)


WRITERS = (a_manager, a_callback, a_graph)


@pytest.mark.parametrize("other", OTHERS, ids=lambda one: one.__name__)
def test_no_writer_begins_beside_the_steps_of_another_run(tmp_path: Path, other: Callable[[Path], None]) -> None:
    place = tmp_path / "run"
    other(place)
    before = sorted(place.rglob("*"))
    ways = ["choose another directory", f"init_from={str(place)!r}"]
    ways += ["step_prefix='model'"] if other is with_another_prefix else [f"holdfast import {place} NEW"]
    for begin in WRITERS:
        with pytest.raises(hf.CheckpointExistsError) as refusal:
            begin(place)
        said = str(refusal.value)
        assert f"{place} holds {OTHERS[other]}" in said
        assert all(way in said for way in ways)
    assert sorted(place.rglob("*")) == before
    steps = hf.CheckpointManager(place, options=hf.CheckpointManagerOptions(read_only=True)).all_steps()
    by_orbax_too = other in (by_orbax, by_orbax_with_a_prefix)
    assert steps == ([1, 2] if by_orbax_too else []), "a manager that only reads shows the steps of Orbax"


def logs_and_figures(place: Path) -> None:
    for name in ("version_0", "figures_2024", "100"):
        (place / name).mkdir(parents=True)
        (place / name / "metrics.csv").write_text("step,loss")
    for name in ("events.out.tfevents.1700000000.host.1", "config.yaml", "train.ckpt.log", "notes-5.index"):
        (place / name).write_text("text")


def weights_beside(place: Path) -> None:
    hf.save(place / "pretrained_0", {"w": np.ones(2)})
    torch.save({"w": torch.ones(2)}, place / "pretrained.ckpt")
    hf.export_checkpoint(place / "pretrained_0", place / "best.safetensors", "safetensors")


def an_unfinished_save(place: Path) -> None:
    with hf.CheckpointManager(place / "..") as manager:
        manager.save(7, {"w": np.ones(2)})
    (place / ".." / "7").rename(place / "7")
    (place / "7" / "checkpoint.json").unlink()


@pytest.mark.parametrize(
    "fill", [logs_and_figures, weights_beside, an_unfinished_save], ids=lambda one: str(one.__name__)
)
def test_other_files_do_not_matter(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    place = tmp_path / "at" / "run"
    place.mkdir(parents=True)
    fill(place)
    for begin in WRITERS:
        begin(place)


def test_files_of_a_callback_beside_a_run_do_not_stop_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's ModelCheckpoint may save before the callback does, and the machine fail then."""
    place = tmp_path / "run"
    with hf.CheckpointManager(place) as manager:
        manager.acquire()
    by_lightning(tmp_path / "files")
    for file in (tmp_path / "files").iterdir():
        file.rename(place / file.name)
    with caplog.at_level(logging.WARNING, "holdfast"), hf.CheckpointManager(place) as manager:
        manager.save(1, {"w": np.ones(2)})
    assert "2 checkpoints of Lightning, the newest epoch=1-step=2.ckpt of step 2, but none of this run" in caplog.text
    caplog.clear()
    hf.CheckpointManager(place)
    assert caplog.text == ""


@pytest.mark.parametrize("other", [by_orbax, by_orbax_with_a_prefix, by_flax], ids=lambda one: str(one.__name__))
def test_an_imported_run_goes_on(tmp_path: Path, other: Callable[[Path], None]) -> None:
    other(tmp_path / "theirs")
    expected = trained(2)
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert [one.step for one in done] == [1, 2]
    with hf.CheckpointManager(tmp_path / "ours") as manager:
        assert bits(manager.restore(2, fresh())) == bits(expected)
        assert bits(manager.restore(None, jax.eval_shape(fresh))) == bits(expected)
        if other is not by_flax:
            assert manager.metadata() == {"data": "digits", "rate": 0.1}
            assert [manager.custom_metadata(step) for step in (1, 2)] == [{"epoch": 1}, {"epoch": 2}]
            assert [manager.metrics(step) for step in (1, 2)] == [{"loss": 0.25}, {"loss": 0.5}]
    with CheckpointCallback(tmp_path / "ours", save_interval_steps=1) as checkpoint:
        with pytest.raises(hf.TreeMismatchError, match="Leave data= out of restore_or_initialize"):
            checkpoint.restore_or_initialize(fresh(), data=np.random.default_rng(0))
        state, start = checkpoint.restore_or_initialize(fresh())
        assert (start, bits(state)) == (2, bits(expected))
        checkpoint.on_step(3, state.replace(step=3), data=np.random.default_rng(0))
    assert [one.step for one in hf.list_checkpoints(tmp_path / "ours")] == [1, 2, 3]


def test_an_imported_run_of_lightning_is_one_of_steps(tmp_path: Path) -> None:
    by_lightning(tmp_path / "theirs")
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert [(one.step, Path(one.source).name) for one in done] == [
        (1, "epoch=0-step=1.ckpt"),
        (2, "epoch=1-step=2.ckpt"),
    ]
    assert hf.load(tmp_path / "ours")["global_step"] == 2
    assert hf.load(tmp_path / "theirs")["global_step"] == 2


def test_facts_about_a_step(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path / "run", metadata={"data": "digits"}) as manager:
        facts = {"epoch": 1, "files": ["a", "b"]}
        manager.save(1, {"w": np.ones(2)}, custom_metadata=facts)
        facts["epoch"] = 2
        with pytest.raises(hf.errors.OptionError, match="custom_metadata= cannot be stored as JSON"):
            manager.save(3, {"w": np.ones(2)}, custom_metadata={"rate": np.float32(1)})
        manager.save(2, {"w": np.ones(2)})
        manager.wait_until_finished()
        manager.record_metrics(1, {"loss": 2.0})
    again = hf.CheckpointManager(tmp_path / "run", options=hf.CheckpointManagerOptions(read_only=True))
    assert [again.custom_metadata(step) for step in again.all_steps()] == [{"epoch": 1, "files": ["a", "b"]}, None]
    assert again.metrics(1) == {"loss": 2.0}
    hf.export_checkpoint(tmp_path / "run", tmp_path / "orbax", "orbax")
    with ocp.CheckpointManager(tmp_path / "orbax") as theirs:
        assert theirs.metadata().custom_metadata == {"data": "digits"}
        assert theirs.metadata(1).custom_metadata == {"epoch": 1, "files": ["a", "b"]}

"""The options are the same in every place that takes them: managers, both callbacks, recipes."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import holdfast as hf
from holdfast.engine.manager import (
    CheckpointOptions,
    KeepAll,
    LearnedInterval,
    mirror_of,
    option_texts,
    retention_rules,
)
from holdfast.engine.manager.decisions import OnBest
from holdfast.engine.manager.intervals import Every
from holdfast.engine.manager.options import save_triggers
from holdfast.engine.manager.retention import KeepBest, KeepLatest, KeepSteps
from holdfast.integrations.flax import CheckpointCallback as FlaxCallback
from holdfast.integrations.lightning import CheckpointCallback as LightningCallback
from holdfast.integrations.lightning.store import CallbackArguments as LightningArguments
from holdfast.integrations.loop import LoopArguments
from holdfast.integrations.options import CallbackOptions
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.schema import CheckpointSection

SHARED = [field.name for field in fields(CheckpointOptions)]


def of_recipe(path: Path, **options: Any) -> hf.CheckpointManagerOptions:
    (path / "recipe.yaml").write_text("recipe: flax_digits\n", encoding="utf-8")
    if isinstance(local := options.get("local"), hf.Local):
        options["local"] = f"{{url: {local.url}, every: {local.every}}}"
    arguments = [f"checkpoint.{name}={str(value).lower()}" for name, value in options.items()]
    return load_configuration(str(path / "recipe.yaml"), arguments).config.checkpoint.options().manager_options()


PLACES: dict[str, Callable[..., hf.CheckpointManagerOptions]] = {
    "manager": lambda path, **options: hf.CheckpointManagerOptions(**options),
    "flax": lambda path, **options: FlaxCallback(path, **options).manager.options,
    "lightning": lambda path, **options: LightningCallback(path, **options).manager.options,
    "recipe": of_recipe,
}
LOCAL = hf.Local("/nowhere/memory", every=5)  # made at the first save
LOSS = {"best_fn": "loss", "best_mode": "max"}
EVERY_STEP, ALL = (Every(steps=1),), (KeepAll(),)
RULES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "newest": ({"max_to_keep": 3}, (KeepLatest(3),)),
    "best and newest": ({**LOSS, "max_to_keep": 2, "keep_latest": 3}, (KeepBest(2, "loss"), KeepLatest(3))),
    "period": ({"max_to_keep": 1, "keep_period": 5}, (KeepLatest(1), Every(steps=5))),
    "time": ({"keep_latest": 1, "keep_time_interval": "30m"}, (KeepLatest(1), Every(secs=1800))),
    "chosen": ({"max_to_keep": 1, "keep_steps": [2, 5]}, (KeepLatest(1), KeepSteps(frozenset({2, 5})))),
}
Effect = tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]  # options, and the triggers and rules that they make
EFFECTS: dict[str, Effect] = {
    "steps": ({"save_interval_steps": 7}, (Every(steps=7),), ALL),
    "seconds": ({"save_interval_secs": "1h"}, (Every(secs=3600),), ALL),
    "learned": ({"save_interval_secs": "auto"}, (LearnedInterval(60, 3600),), ALL),
    "learned in bounds": ({"save_interval_secs": "auto 30s to 2h"}, (LearnedInterval(30, 7200),), ALL),
    "both": ({"save_interval_steps": 7, "save_interval_secs": 60}, (Every(steps=7), Every(secs=60)), ALL),
    "best": ({"save_on_best": True, **LOSS}, (OnBest("loss"),), (KeepBest(1, "loss"), *ALL)),
    "least": (
        {"save_on_best": True, **LOSS, "best_mode": "min", "max_to_keep": 3},
        (OnBest("loss", "min"),),
        (KeepBest(3, "loss", "min"),),
    ),
    **{name: ({"save_interval_steps": 1, **given}, EVERY_STEP, tuple(rules)) for name, (given, rules) in RULES.items()},
    "mirror": ({"save_interval_steps": 1, "mirror": "memory://tests/options"}, EVERY_STEP, ALL),
    "local": ({"save_interval_steps": 1, "local": LOCAL}, EVERY_STEP, ALL),
    "unchanged": ({"save_interval_steps": 1, "reuse_unchanged": False}, EVERY_STEP, ALL),
    "names": ({"save_interval_steps": 1, "step_name_width": 8}, EVERY_STEP, ALL),
}
REFUSED: dict[str, dict[str, Any]] = {
    "steps": {"save_interval_steps": 0},
    "seconds": {"save_interval_secs": "soon"},
    "best": {"save_on_best": True},
    "mode": {"best_mode": "most"},
    "no mode": {"best_fn": "loss"},
    "newest": {"max_to_keep": 0},
    "latest": {"keep_latest": -1},
    "period": {"keep_period": True},
    "time": {"keep_time_interval": 0},
    "chosen": {"keep_steps": 4},
    "mirror": {"mirror": "what://x"},
    "local": {"local": 10},
    "unchanged": {"reuse_unchanged": "sometimes"},
    "names": {"step_name_width": 0},
}


def test_every_shared_option_is_in_the_tables() -> None:
    assert {name for given, _, _ in EFFECTS.values() for name in given} == set(SHARED)
    assert {name for given in REFUSED.values() for name in given} == set(SHARED)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", EFFECTS)
def test_an_option_has_the_same_effect_everywhere(place: str, case: str, tmp_path: Path) -> None:
    given, triggers, rules = EFFECTS[case]
    options = PLACES[place](tmp_path, **given)

    assert save_triggers(options) == triggers
    assert retention_rules(options) == rules
    assert mirror_of(options) == (hf.Mirror(given["mirror"]) if "mirror" in given else None)
    assert options.local == given.get("local")
    assert options.reuse_unchanged is given.get("reuse_unchanged", True)
    assert options.step_name_width == given.get("step_name_width")


@pytest.mark.parametrize("place", ["manager", "flax", "lightning"])
def test_policies_have_the_same_effect_in_all_programs(place: str, tmp_path: Path) -> None:
    periods = [Every(steps=7, keep=2), Every(steps=100)]
    options = PLACES[place](tmp_path, save=periods)
    assert save_triggers(options) == tuple(periods)
    assert retention_rules(options) == tuple(periods)
    options = PLACES[place](tmp_path, save_interval_steps=1, keep=periods[0])
    assert retention_rules(options) == (periods[0],)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_everywhere(place: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(hf.errors.OptionError, match=next(iter(REFUSED[case]))):
        PLACES[place](tmp_path, **REFUSED[case])


@pytest.mark.parametrize("place", PLACES)
def test_without_a_trigger_each_place_has_its_documented_default(place: str, tmp_path: Path) -> None:
    expected = Every(steps=1) if place == "manager" else Every(secs=900)

    assert save_triggers(PLACES[place](tmp_path)) == (expected,)
    assert save_triggers(PLACES[place](tmp_path, max_to_keep=3)) == (expected,)
    if place != "recipe":
        assert save_triggers(PLACES[place](tmp_path, save_interval_steps=None)) == (expected,)


@pytest.mark.parametrize(
    ("callback", "arguments"), [(hf.CheckpointCallback, LoopArguments), (LightningCallback, LightningArguments)]
)
def test_the_signature_of_a_callback_is_that_of_its_options(callback: Any, arguments: Any) -> None:
    """It is written out, so that tools see it without running it; nothing is left out, and nothing differs."""
    assert "__signature__" not in vars(callback.__init__)
    written = dict(inspect.signature(callback).parameters)
    declared = inspect.signature(arguments).parameters
    assert [(one.name, one.kind, one.default) for one in written.values()] == [
        (one.name, one.kind, one.default) for one in declared.values()
    ]
    assert all(declared[field.name].default == field.default for field in fields(CallbackOptions))
    hints, known = get_type_hints(callback.__init__), get_type_hints(arguments)
    for name in written:
        same = known[name]
        if callback is LightningCallback and get_origin(same) is Collection:  # which parsers of arguments do not know
            same = Sequence[get_args(same)]  # type: ignore[misc]  # made at runtime
        assert hints[name] == same


def test_defaults_are_the_same_everywhere() -> None:
    declared = {field.name: field.default for field in fields(CallbackOptions)}
    manager = inspect.signature(hf.CheckpointManagerOptions).parameters
    assert {name: manager[name].default for name in SHARED} == {name: declared[name] for name in SHARED}
    section = CheckpointSection().callback_arguments()
    assert section == {**declared, "keep_steps": [], "signals": ["SIGTERM", "SIGHUP"], "replicated": []}


@pytest.mark.parametrize(
    "place", [hf.CheckpointManagerOptions, hf.Mirror, hf.Local, hf.CheckpointCallback, LightningCallback]
)
def test_every_option_is_documented_where_it_is_taken_and_everywhere_alike(place: Any) -> None:
    texts, of_managers, of_loops = map(option_texts, (place, hf.CheckpointManagerOptions, hf.CheckpointCallback))
    assert sorted(texts) == sorted(name for name in inspect.signature(place).parameters if name != "unknown")
    assert all(texts.values())
    if place not in (hf.Mirror, hf.Local):
        assert texts == {**texts, **{name: text for name, text in (of_managers | of_loops).items() if name in texts}}


def test_the_documentation_of_a_loop_begins_with_what_everybody_needs() -> None:
    (group,) = re.findall(r"^ {4}Args:\n((?: {8}.*\n)+)", hf.CheckpointCallback.__doc__ or "", re.MULTILINE)
    first = re.findall(r"^ {8}(\w+): ", group, re.MULTILINE)
    assert first == ["directory", "save_interval_steps", "max_to_keep", "best_fn", "best_mode"]


def test_managers_and_callbacks_show_where_they_save_and_what_was_chosen(tmp_path: Path) -> None:
    mirror = "s3://bucket/run"
    assert repr(hf.CheckpointCallback(tmp_path, save_interval_steps=7, resume="must")) == (
        f"CheckpointCallback('{tmp_path}', save_interval_steps=7, resume='must')"
    )
    options = hf.CheckpointManagerOptions(max_to_keep=3, mirror=mirror, read_only=True)
    assert repr(hf.CheckpointManager(tmp_path, options=options)) == (
        f"CheckpointManager('{tmp_path}', max_to_keep=3, mirror='s3://bucket/run', read_only=True)"
    )


def test_callbacks_take_their_options_by_name(tmp_path: Path) -> None:
    assert FlaxCallback(directory=tmp_path).manager.directory == LightningCallback(dirpath=tmp_path).manager.directory
    for callback in (FlaxCallback, LightningCallback):
        with pytest.raises(TypeError, match=r"Callback.__init__\(\) got an unexpected keyword.*max_to_kep"):
            callback(tmp_path, max_to_kep=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"Callback.*positional argument"):
            callback(tmp_path, 3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="only CheckpointManagerOptions takes it"):
            callback(tmp_path, read_only=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("save_top_k", "here it is max_to_keep"),
        ("every_n_train_steps", "here it is save_interval_steps"),
        ("train_time_interval", "here it is save_interval_secs"),
        ("monitor", "here it is best_fn"),
        ("mode", "here it is best_mode"),
        ("filename", "named by its number"),
        ("save_last", "the newest checkpoint is always kept"),
        ("save_decision_policy", "here it is save"),
        ("enable_async_checkpointing", "leave it out"),
        ("todelete_subdir", "leave it out: a step that no rule keeps is deleted at once"),
        ("single_host_load_and_broadcast", "here it is load_and_broadcast"),
        ("max_to_kep", "did you mean max_to_keep"),
        ("nonsense", "$"),
    ],
)
def test_names_of_other_libraries_are_explained(tmp_path: Path, name: str, advice: str) -> None:
    takes: tuple[Any, ...] = (FlaxCallback, LightningCallback)
    for take in takes:
        with pytest.raises(hf.errors.UnknownArgumentError, match=f"Callback.*'{name}'.*{advice}"):
            take(tmp_path, **{name: 1})
    with pytest.raises(hf.errors.UnknownArgumentError, match=f"CheckpointManagerOptions.*{advice}"):
        hf.CheckpointManagerOptions(**{name: 1})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


TAKERS: dict[str, Callable[..., CallbackOptions]] = {
    "flax": lambda path, **options: FlaxCallback(path, **options)._options,
    "lightning": lambda path, **options: LightningCallback(path, **options)._options,
    "recipe": lambda path, **options: CheckpointSection(**options).options(),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_signals_are_given_by_name(taker: str, tmp_path: Path) -> None:
    """Or in a program by number, and one of them alone."""
    assert TAKERS[taker](tmp_path).preemption_signals() == (signal.SIGTERM, signal.SIGHUP)
    several = TAKERS[taker](tmp_path, signals=["SIGTERM", "USR1", "SIGTERM"], grace_secs="30s")
    assert several.preemption_signals() == (signal.SIGTERM, signal.SIGUSR1)
    for refused in ("SIGKILL", "STOP", "SIGNAL"):
        with pytest.raises(hf.errors.OptionError, match=f"signals: '{refused}' is not a signal that a process can"):
            TAKERS[taker](tmp_path, signals=[refused])
    if taker != "recipe":
        for given in ([signal.SIGINT], "SIGINT"):
            assert TAKERS[taker](tmp_path, signals=given).preemption_signals() == (signal.SIGINT,)
        with pytest.raises(hf.errors.OptionError, match="grace_secs=0 is not a duration"):
            TAKERS[taker](tmp_path, grace_secs=0)
    assert list(tmp_path.iterdir()) == []

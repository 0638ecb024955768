from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recipes.bundled import bundled_configs
from holdfast.recipes.configuration import load_configuration, read_config, read_yaml, to_yaml
from holdfast.recipes.problems import ConfigError
from holdfast.recipes.registry import RECIPES
from holdfast.recipes.schema import LocalSection, MirrorSection, Section


def problems_of(tmp_path: Path, text: str, *arguments: str) -> list[str]:
    """Returns the problems of a configuration, its path left out."""
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_configuration(str(path), arguments)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return [str(problem).replace(str(path), "FILE") for problem in caught.value.problems]


ERRORS = {  # what follows the name of the recipe in a file: what is said
    "checkpoint:\n  monitor: val_loss": "FILE:3: checkpoint.monitor: unknown key: here it is best_fn",
    "checkpoint:\n  dirpath: runs/x": (
        "FILE:3: checkpoint.dirpath: unknown key: the directory is the first argument of callbacks and managers, "
        "and directory: in a configuration"
    ),
    "train:\n  stpes: 3": 'FILE:3: train.stpes: unknown key; did you mean "steps"?',
    "chekpoint:\n  max_to_keep: 3": 'FILE:2: chekpoint: unknown key; did you mean "checkpoint"?',
    "max_to_keep: 3": 'FILE:2: max_to_keep: unknown key; did you mean "checkpoint.max_to_keep"?',
    "logging:\n  zzz: 3": "FILE:3: logging.zzz: unknown key; expected one of interval_steps, level",
    "seed: 1\nname: x\nseed: 2": "FILE:4: seed: the key is given twice; the first is at FILE:2",
    'train: {steps: "100"}': 'FILE:2: train.steps: expected a whole number, found the text "100"',
    "train: {steps: 1e3}": "FILE:2: train.steps: expected a whole number, found 1000.0",
    "seed: true": "FILE:2: seed: expected a whole number, found true",
    "train: {steps: 0}": "FILE:2: train.steps: expected a number above 0, found 0",
    "optimizer: {learning_rate: .nan}": "FILE:2: optimizer.learning_rate: expected a finite number, found nan",
    "model: {dropout: 1.5}": "FILE:2: model.dropout: expected a number below 1.0, found 1.5",
    "checkpoint: {save_on_best: on}": 'FILE:2: checkpoint.save_on_best: expected true or false, found the text "on"',
    "checkpoint: {resume: always}": (
        "FILE:2: checkpoint.resume: expected 'auto', 'must', 'never', 'best' or a step number, found the text "
        '"always"'
    ),
    "checkpoint: {partial: all}": "FILE:2: checkpoint.partial: expected 'initialize', found the text \"all\"",
    "checkpoint: {save_interval_secs: soon}": (
        'FILE:2: checkpoint.save_interval_secs: expected seconds above zero, or text such as "15m", "auto" or '
        '"auto 1m to 1h", found the text "soon"'
    ),
    "model:\n  hidden:\n  - 64\n  - many": 'FILE:5: model.hidden.1: expected a whole number, found the text "many"',
    "model: {hidden: []}": "FILE:2: model.hidden: expected a list of at least 1, found the list []",
    "model: {hidden: 64}": "FILE:2: model.hidden: expected a list, found 64",
    "seed: 0\ntrain:\n": "FILE:3: train: expected a section with keys, found nothing",
    "name: a/b": 'FILE:2: name: expected a valid folder name, found the text "a/b"',
    "name: !!python/name:os.system x": (
        "FILE:2: name: the tag tag:yaml.org,2002:python/name:os.system is not allowed: write plain YAML"
    ),
    "seed: !!int many": "FILE:2: seed: the tag tag:yaml.org,2002:int is not allowed: write plain YAML",
    "seed: {a: 1, b: 2}": "FILE:2: seed: expected a whole number, found a section (a, b)",
    "seed: {}": "FILE:2: seed: expected a whole number, found an empty section",
    "[a, b]: 3": "FILE:2: a key must be text, found a list or a section",
    "model: {hidden: &a [1, *a]}": "FILE:2: model.hidden.1: an alias that contains itself has no value",
    "checkpoint: {best_fn: val_acuracy}": (
        "FILE:2: checkpoint.best_fn: expected a metric of this recipe (loss, val_accuracy, val_loss), found "
        '"val_acuracy"; did you mean "val_accuracy"?'
    ),
    "checkpoint: {best_fn: val_loss}": (
        "FILE:2: checkpoint.best_fn: best_fn='val_loss' needs best_mode: best_mode='min' if the smallest value is "
        "best, as of a loss, or best_mode='max' if the largest is, as of an accuracy"
    ),
    "checkpoint: {save_on_best: true}": (
        "FILE:2: checkpoint.save_on_best: save_on_best=True needs best_fn: the name of a metric, or a function of "
        "the metrics; here the metrics are loss, val_accuracy, val_loss"
    ),
    "checkpoint: {signals: [SIGKIL]}": (
        "FILE:2: checkpoint.signals: signals: 'SIGKIL' is not a signal that a process can handle; pass names such "
        "as 'SIGTERM', 'SIGINT' or 'SIGUSR1'"
    ),
    'checkpoint: {save_interval_steps: 5, init_from: "what://x"}': (
        "FILE:2: checkpoint.init_from: init_from='what://x': 'what://x' has an unknown scheme, 'what': expected a "
        "path, file:///path, memory://name, s3://bucket/name, gs://bucket/name or az://container/name"
    ),
    "checkpoint: {allow_changes: [optimizer.learning_rat]}": (
        "FILE:2: checkpoint.allow_changes.0: expected one of seed, model, data, optimizer, or a key in them, "
        'found "optimizer.learning_rat"; did you mean "optimizer.learning_rate"?'
    ),
    "checkpoint: {replicated: [global_generators, dta]}": (
        'FILE:2: checkpoint.replicated.1: expected state of this recipe (data, global_generators), found "dta"; '
        'did you mean "data"?'
    ),
    "checkpoint: {compression: 23}": "FILE:2: checkpoint.compression: expected a number of at most 22, found 23",
    'checkpoint: {init_from: ""}': 'FILE:2: checkpoint.init_from: expected text that is not empty, found the text ""',
    'name: "\\ud800"': (
        'FILE: expected valid Unicode text, without half a surrogate pair, found the text "{"recipe": '
        '"flax_digits", "name": "\\ud800"}"'
    ),
    "optimizer: {warmup_steps: 10, decay_steps: 10}": (
        "FILE:2: optimizer.decay_steps: expected more steps than warmup_steps (10), found 10"
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_place_key_and_what_was_expected(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, f"recipe: flax_digits\n{text}\n") == [ERRORS[text]]


def test_all_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "recipe: flax_digits\ntrain:\n  steps: x\n  stepz: 1\nseed: 1\nseed: 2\nmodel: {hidden: 3}\n"

    found = problems_of(tmp_path, text, "data.batch_size=y", "typo")

    places = ["FILE:3", "FILE:4", "FILE:6", "FILE:7", "argument typo", "argument data.batch_size=y"]
    assert [problem.split(": ")[0] for problem in found] == places


NO_CONFIGURATIONS = {  # the text of a file: how the first problem begins
    "": "FILE: expected a section with keys, the first of them recipe, found nothing",
    "- a\n- b\n": "FILE: expected a section with keys, the first of them recipe, found the list ['a', 'b']",
    "seed: 3\n": f"FILE: recipe: the key is missing; expected one of {', '.join(RECIPES)}",
    "\nrecipe: flax_digit\n": (
        f"FILE:2: recipe: expected one of {', '.join(RECIPES)}, or module:function, "
        'found the text "flax_digit"; did you mean "flax_digits"?'
    ),
    "recipe: flax_digits\nname: [a\n": "FILE:3: this is not YAML: ",
    "recipe: flax_digits\n--- \nrecipe: x\n": "FILE:2: this is not YAML: ",
    "recipe: a\x00b\n": "FILE: this is not YAML: ",
    "recipe: *nowhere\n": "FILE:1: this is not YAML: ",
}


@pytest.mark.parametrize("text", NO_CONFIGURATIONS)
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, text)[0].startswith(NO_CONFIGURATIONS[text])


@pytest.mark.parametrize(
    ("recipe", "name", "names"),
    [
        ("flax_text", "loaders", "data, global_generators"),
        ("lightning_digits", "data", "global_generators"),
        ("self_play", "data", "global_generators"),
    ],
)
def test_each_recipe_knows_its_replicated_state(tmp_path: Path, recipe: str, name: str, names: str) -> None:
    found = problems_of(tmp_path, f"recipe: {recipe}\ncheckpoint: {{replicated: [{name}]}}\n")
    assert found == [f'FILE:2: checkpoint.replicated.0: expected state of this recipe ({names}), found "{name}"']
    allowed = [f"checkpoint.replicated=[{names}]"]
    assert load_configuration(recipe, allowed).config.checkpoint.replicated == names.split(", ")


def test_the_transformer_needs_heads_that_fit(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "recipe: flax_text\nmodel: {width: 65}\n")
    assert found == ["FILE:2: model.width: expected a multiple of heads (4), found 65"]


SCALARS = {
    "1e-3": 0.001,
    "1E5": 1e5,
    "-2.5": -2.5,
    "1.": 1.0,
    ".inf": math.inf,
    "-.INF": -math.inf,
    "010": 10,
    "0x1F": 31,
    "0o17": 15,
    "+7": 7,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "yes": "yes",
    "on": "on",
    "no": "no",
    "2024-01-01": "2024-01-01",
    "1:30:00": "1:30:00",
    "15m": "15m",
    "'1'": "1",
    "=": "=",
    "[1, 2.0, a]": [1, 2.0, "a"],
    "{a: {b: 1}}": {"a": {"b": 1}},
    "&x [1]": [1],
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_follow_yaml_1_2(text: str) -> None:
    document = read_yaml(f"key: {text}\n", "file")

    assert document.problems == []
    value = document.root["key"]
    assert (value, type(value)) == (SCALARS[text], type(SCALARS[text]))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
    | st.sampled_from(["1e-3", "on", "null", "010", "2024-01-01", "", "~", "#", ": ", "- "]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc=:-", max_size=5), inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("xyz", min_size=1), plain, max_size=5))
def test_what_is_written_is_read_again(values: dict[str, object]) -> None:
    document = read_yaml(to_yaml(values), "file")

    assert document.problems == []
    assert document.root == values
    assert repr(document.root) == repr(values)  # 1, 1.0 and true are equal, but not the same


OVERRIDES: dict[str, tuple[str, Any]] = {  # arguments: a key, and its value
    "train.steps=7": ("train.steps", 7),
    "optimizer.learning_rate=1e-2": ("optimizer.learning_rate", 0.01),
    "optimizer.weight_decay=0": ("optimizer.weight_decay", 0.0),
    "checkpoint.best_fn=": ("checkpoint.best_fn", None),
    "model.hidden=[8, 9]": ("model.hidden", [8, 9]),
    "model.hidden.1=5": ("model.hidden", [128, 5]),
    "model.hidden.0=4; model.hidden.1=5": ("model.hidden", [4, 5]),
    "train={steps: 5}": ("train.steps", 5),
    "logging.level=debug": ("logging.level", "debug"),
    "run_dir=/a=b": ("run_dir", "/a=b"),
    "checkpoint.save_interval_secs=1h30m": ("checkpoint.save_interval_secs", "1h30m"),
}


@pytest.mark.parametrize("arguments", OVERRIDES)
def test_overrides_go_over_the_file(arguments: str) -> None:
    path, value = OVERRIDES[arguments]
    found: Any = load_configuration("flax_digits", arguments.split("; ")).resolved()
    for key in path.split("."):
        found = found[key]
    assert found == value


OVERRIDE_ERRORS = {  # arguments: what is said of the last one
    "train.steps": "expected key=value, such as train.steps=400",
    "=3": "expected key=value, such as train.steps=400",
    "train..steps=3": "expected key=value, such as train.steps=400",
    "trian.steps=3": 'trian: unknown key; did you mean "train"?',
    "train.stesp=3": 'train.stesp: unknown key; did you mean "steps"?',
    "train.steps=1.5": "train.steps: expected a whole number, found 1.5",
    "train={steps: x}": 'train.steps: expected a whole number, found the text "x"',
    "seed=1; seed=2": "seed: the key is given twice; the first is seed=1",
    "train={steps: 1}; train.steps=2": "train.steps: the key is given twice; the first is train={steps: 1}",
    "train.steps=2; train={steps: 1}": "train: the key is given twice; the first is train.steps=2",
    "model.hidden.2=5": "model.hidden.2: expected the index of an item, 0 to 1, found 2",
    "seed.x=5": "seed: expected a section to set a key in, found 0",
    "name=[a": "name: this is not YAML: ",
    "train={steps: 1, steps: 2}": "train: the key is given twice; the first is at argument train={steps: 1, steps: 2}",
}


@pytest.mark.parametrize("given", OVERRIDE_ERRORS)
def test_override_errors_name_the_argument(given: str) -> None:
    arguments = given.split("; ")
    with pytest.raises(ConfigError) as caught:
        load_configuration("flax_digits", arguments)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"argument {arguments[-1]}: {OVERRIDE_ERRORS[given]}")


def test_where_a_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("flax_text", "flax_text.yaml", "configs/flax_text.yaml", "configs/flax_text"):
        assert load_configuration(name).recipe.name == "flax_text"
    Path("flax_text.yaml").write_text("recipe: flax_digits\n", encoding="utf-8")  # a file goes before a bundled name
    assert read_config("flax_text") == ("flax_text.yaml", "recipe: flax_digits\n")
    Path("config.yaml").write_text("recipe: flax_text\n", encoding="utf-8")
    Path("empty").mkdir()
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    missing = "no such file, and holdfast has no configuration with this name; "
    for name, message in (
        ("flax_txt", rf'^flax_txt: {missing}did you mean "flax_text"\?$'),
        ("/nowhere/else.yaml", rf"^/nowhere/else\.yaml: {missing}bundled: {', '.join(sorted(RECIPES))}$"),
        ("empty", r"this is a directory; give the path of a YAML file$"),
        (".", r"this is a directory; did you mean config\.yaml\?"),
        ("binary.yaml", "the file cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_configuration(name)


def test_paths_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("run_dir", "checkpoint.directory", "checkpoint.init_from")

    resolved = load_configuration("flax_text", [f"{key}=~/a/~b" for key in keys]).resolved()

    assert resolved["run_dir"] == "/home/me/a/~b"
    assert resolved["checkpoint"]["directory"] == resolved["checkpoint"]["init_from"] == "/home/me/a/~b"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_has_a_configuration_and_documented_keys(name: str) -> None:
    configuration = load_configuration(name)
    sections = [configuration.config, *(value for _, value in configuration.config if isinstance(value, Section))]

    assert name in bundled_configs()
    assert configuration.recipe.name == name
    for section in sections:
        for key, field in type(section).model_fields.items():
            assert field.description, f"{type(section).__name__}.{key} has no documentation"


def test_the_checkpoint_section_has_the_words_of_the_callbacks() -> None:
    import inspect

    from holdfast import Local, Mirror
    from holdfast.integrations.options import CallbackOptions

    section = load_configuration("flax_digits").config.checkpoint.callback_arguments()

    assert list(section) == list(inspect.signature(CallbackOptions).parameters)
    assert list(LocalSection(url="/here", every=1).model_dump()) == list(inspect.signature(Local).parameters)
    assert list(MirrorSection(url="there").model_dump()) == list(inspect.signature(Mirror).parameters)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
TOO_DEEP = "lists and sections are nested more than 100 levels deep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "config.yaml: this has more than 100000 values, including those of aliases"),
        ("[" * 500 + "]" * 500, f"config.yaml:1: {TOO_DEEP}"),
        ("{a: " * 500 + "}" * 500, f"config.yaml:1: {TOO_DEEP}"),
        ("\n".join(" " * n + "a:" for n in range(1500)), f"config.yaml:101: {TOO_DEEP}"),
        ("- " * 1500, f"config.yaml:1: {TOO_DEEP}"),
    ],
    ids=["bomb", "lists", "sections", "indented", "items"],
)
@pytest.mark.parametrize("included", [False, True])
def test_bombs_are_one_error(tmp_path: Path, text: str, message: str, included: bool) -> None:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "outer.yaml").write_text("defaults: config\nrecipe: flax_digits\n")
    assert message in problem_of_defaults(tmp_path / ("outer" if included else "config"))


def test_a_variable_of_the_environment_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP", "[" * 500)
    assert read_yaml("a: ${env:DEEP}", "here").root == {"a": "[" * 500}


def problem_of_defaults(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_configuration(str(path))
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("defaults", "base", "said"),
    [
        ("base", "- a\n- b\n", r"config\.yaml:2: defaults: base: expected a file .*, found the list \['a', 'b'\]$"),
        ("base", "words", r'config\.yaml:2: defaults: base: expected a file .*, found the text "words"$'),
        ("base", "", r"config\.yaml:2: defaults: base: expected a file .*, found nothing$"),
        ("base", "seed: x\n", r"base\.yaml:1: seed: expected a whole number"),
        ("nowhere", "", r"config\.yaml:2: defaults: nowhere: no such file"),
        ("3", "", r"config\.yaml:2: defaults: expected the name of a file, or a list of them, found 3"),
        ("config", "", r"config\.yaml:2: defaults: config includes itself"),
    ],
)
def test_mistakes_in_defaults(tmp_path: Path, defaults: str, base: str, said: str) -> None:
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "config.yaml").write_text(f"recipe: flax_digits\ndefaults: {defaults}\n")
    assert re.search(said, problem_of_defaults(tmp_path / "config"), re.DOTALL)


def test_defaults_that_double_with_each_file(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "40.yaml").write_text("recipe: flax_digits\n")
    assert "defaults lead to more than 200 files" in problem_of_defaults(tmp_path / "0.yaml")

"""Recipes of one's own: functions of a project, files that include others, variables, and sweeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.commands import Cli, said_by

from holdfast.recipes.configuration import expand_sweep, load_configuration
from holdfast.recipes.problems import ConfigError
from holdfast.recipes.runner import run

PROGRAM = '''
from __future__ import annotations

from dataclasses import dataclass, field

from pathlib import Path

import numpy as np

import holdfast as hf
from holdfast.recipes import Config, Outcome, RunContext, Section


@dataclass(frozen=True)
class Model:
    """The walk."""

    width: int = field(default=4, metadata={"help": "Numbers in the state."})
    table: Path | None = None
    scales: tuple[float, ...] = (1.0, 2.0)


@dataclass(frozen=True)
class Walk:
    """A random walk."""

    seed: int
    rate: float = 0.5
    model: Model = field(default_factory=Model)


def train(config: Walk, context: RunContext) -> Outcome:
    """Walks at random."""
    assert isinstance(config, Walk) and isinstance(config.model, Model)
    state = {"x": np.zeros(config.model.width), "scale": np.array(config.model.scales)}
    total = step = context.config.train.steps
    with hf.CheckpointCallback(context.checkpoints, **context.callback_arguments) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        for step in range(start + 1, total + 1):
            noise = np.random.default_rng([config.seed, step]).normal(size=len(state["x"]))
            state["x"] = state["x"] + config.rate * noise
            if checkpoint.on_step(step, state).should_stop:
                break
    return Outcome(start=start, step=step, preempted=checkpoint.should_stop and step < total)


class Noise(Section):
    """Noise."""

    sigma: float = 1.0
    """Its standard deviation."""


class Settings(Config):
    """The keys of this recipe."""

    noise: Noise = Noise()
    """The noise."""


def own(config: Settings, context: RunContext) -> Outcome:
    """Does nothing."""
    return Outcome(start=0, step=config.train.steps, preempted=False)


def forgets(config: Settings, context: RunContext) -> None:
    pass


def one(config: Settings) -> None:
    pass


def number(config: int, context: RunContext) -> None:
    pass


def unknown(config: Nowhere, context: RunContext) -> None:
    pass


@dataclass
class Trains:
    train: int = 3


def trains(config: Trains, context: RunContext) -> None:
    pass


@dataclass
class Goal:
    goal: int


def reaches(config: Goal, context: RunContext) -> None:
    pass


def leaves(config: Config, context: RunContext) -> None:
    raise SystemExit("too few walks" if config.seed else 3)
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives a working directory with a module ``walks`` and a configuration ``walk.yaml``."""
    (tmp_path / "walks.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f():\n    import no_such_module_of_ours\n\n\nf()\n", encoding="utf-8")
    (tmp_path / "walk.yaml").write_text(
        "recipe: walks:train\nname: walk\nseed: 1\ntrain: {steps: 6}\ncheckpoint: {save_interval_steps: 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("walks", "broken"):
        sys.modules.pop(name, None)


def problems(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_configuration("walk.yaml", arguments)
    return str(caught.value)


def test_a_function_of_a_project_trains_and_resumes(project: Path, cli: Cli) -> None:
    assert "done: 6 steps" in cli.output("run", "walk.yaml")
    assert "nothing to do: step 6 is saved" in cli.output("run", "walk.yaml")
    resumed = cli.output("run", "walk.yaml", "train.steps=8")
    assert "step 8 of 8 is saved in runs/walk/checkpoints" in resumed
    quiet = ("run", "walk.yaml", "logging.level=error")
    assert "whose configuration differs" in cli.error(*quiet, "model.width=5", status=2)
    assert "must return an Outcome" in cli.error(*quiet, "recipe=walks:forgets", "name=other", status=2)
    assert "write recipe: walks:train in a YAML file" in cli.error("run", "walks:train", status=2)
    keys = {key["key"]: key for key in cli.json("recipes", "walks:train")["keys"]}
    assert (keys["model.width"]["value"], keys["model.width"]["meaning"]) == (4, "Numbers in the state.")
    assert "train.steps" in keys
    assert cli.error("recipes", "walks:nope", status=2) == "holdfast: walks has no function nope\n"


def test_mistakes_are_reported_together(project: Path) -> None:
    wrong = ("model.widht=3", "rate=fast", "train.steps=0", "model.width=4.0", "model.scales=[x]")
    said = problems(*wrong).splitlines()
    assert sorted(said) == [
        'argument model.scales=[x]: model.scales.0: expected a number, found the text "x"',
        'argument model.widht=3: model.widht: unknown key; did you mean "width"?',
        "argument model.width=4.0: model.width: expected a whole number, found 4.0",
        'argument rate=fast: rate: expected a number, found the text "fast"',
        "argument train.steps=0: train.steps: expected a number above 0, found 0",
    ]


def test_the_keys_of_a_dataclass_and_of_a_subclass_of_config(project: Path) -> None:
    config = load_configuration("walk.yaml", ["model.scales=[3, 4.5]", "model.table=there"]).resolved()
    assert config["model"] == {"width": 4, "table": "there", "scales": [3.0, 4.5]}
    assert problems("model=3") == "argument model=3: model: expected a section with keys, found 3"
    assert list(config)[:5] == ["recipe", "name", "run_dir", "seed", "model"]
    assert problems("recipe=walks:reaches") == "walk.yaml: goal: the key is missing"
    configuration = load_configuration("walk.yaml", ["recipe=walks:own", "noise.sigma=2.5"])
    assert configuration.resolved()["noise"] == {"sigma": 2.5}
    assert configuration.config.IDENTITY == ("recipe", "seed", "noise")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("walks:forgotten", "walks has no function forgotten"),
        ("walks:one", "walks:one takes 1 arguments; a recipe takes two"),
        ("walks:number", "config is annotated with <class 'int'>; expected a subclass of holdfast.recipes.Config"),
        ("walks:unknown", "the annotation of config cannot be resolved: name 'Nowhere' is not defined"),
        ("walks:trains", "Trains has the field train, a key that all recipes have; rename it, and read the key from"),
        ("broken:f", "No module named 'no_such_module_of_ours'"),
        ("broken:f", 'broken.py", line 2, in f'),
        ("absent:f", "absent cannot be imported from"),
        ("walk", "or module:function, found the text"),
    ],
)
def test_what_is_no_recipe(project: Path, name: str, said: str) -> None:
    assert said in problems(f"recipe={name}")


def test_an_installed_package_declares_one(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = project / "walking-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: walking\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[holdfast.recipes]\nrandom_walk = walks:train\n")
    monkeypatch.syspath_prepend(str(project))

    listed = cli.json("recipes")["recipes"]
    assert listed[-1] == {"name": "random_walk", "summary": "walks:train, of walking", "missing": []}
    assert "walks" not in sys.modules, "a listing imports nothing"
    assert "done: 6 steps" not in cli.output("run", "walk.yaml", "recipe=random_walk", "--dry-run")
    assert "done: 6 steps" in cli.output("run", "walk.yaml", "recipe=random_walk")


# ---- files


def test_defaults_are_included(project: Path) -> None:
    (project / "parts").mkdir()
    (project / "parts" / "short.yaml").write_text("train: {steps: 3, eval_interval_steps: 1}\nseed: 5\n")
    (project / "parts" / "wide.yaml").write_text("defaults: short\nmodel: {width: 9}\n")
    (project / "mine.yaml").write_text("defaults: [walk, parts/wide.yaml]\ntrain: {steps: 4}\n")

    config = load_configuration("mine.yaml", ["seed=6"]).resolved()

    assert config["train"] == {"steps": 4, "eval_interval_steps": 1}
    assert (config["model"]["width"], config["seed"], config["name"]) == (9, 6, "walk")


def test_variables_of_the_environment(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("NAME", "7")
    text = "defaults: walk\nname: '${env:NAME}'\ntrain:\n  steps: ${env:STEPS}\nrate: ${env:RATE,0.25}\n"
    (project / "mine.yaml").write_text(f"{text}run_dir: runs/${{env:NAME}}/x\n")

    config = load_configuration("mine.yaml").resolved()
    assert (config["train"]["steps"], config["name"], config["rate"]) == (12, "7", 0.25)
    assert config["run_dir"] == "runs/7/x"

    monkeypatch.delenv("STEPS")
    with pytest.raises(ConfigError, match=r"mine.yaml:4: train.steps: the environment has no variable STEPS"):
        load_configuration("mine.yaml")
    (project / "mine.yaml").write_text("defaults: walk\nname: '${env:NAME'\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:2: name: expected \$\{env:NAME\} or .*, found '\$\{env:NAME'"):
        load_configuration("mine.yaml")


# ---- sweeps


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["seed=1"], [("", ["seed=1"])]),
        (["a=[1, 2]", 'b="x,y"'], [("", ["a=[1, 2]", 'b="x,y"'])]),
        (
            ["seed=0,1", "n=3", "m=[1],[2,3]"],
            [(f"seed={seed},m={m}", [f"seed={seed}", "n=3", f"m={m}"]) for seed in (0, 1) for m in ("[1]", "[2,3]")],
        ),
        (["p=a/b,c"], [("p=a_b", ["p=a/b"]), ("p=c", ["p=c"])]),
        (["p=[a,b"], [("", ["p=[a,b"])]),  # The reader of the argument reports the mistake.
    ],
)
def test_expanding_a_sweep(arguments: list[str], expected: list[tuple[str, list[str]]]) -> None:
    assert expand_sweep(arguments) == expected


def test_a_sweep_runs_one_after_the_other(project: Path, cli: Cli) -> None:
    assert cli.error("run", "walk.yaml", "seed=0,1,x", "rate=0.1,y", status=2).splitlines() == [
        'holdfast: argument rate=y: rate: expected a number, found the text "y"',
        'argument seed=x: seed: expected a whole number, found the text "x"',
    ]
    assert not (project / "runs").exists(), "all runs are checked before the first begins"
    plan = cli.output("run", "walk.yaml", "seed=0,1", "--dry-run").splitlines()
    assert plan[1] == (
        "walks:train in runs/walk/seed=1: would train steps 1 to 6; checkpoints go to runs/walk/seed=1/checkpoints"
    )
    assert not (project / "runs").exists()

    cli.output("run", "walk.yaml", "seed=0,1")
    assert cli.output("run", "walk.yaml", "seed=0,1").count("nothing to do: step 6 is saved") == 2
    found = cli.json("ls", "runs/walk")
    assert [(run["name"], run["newest"]["step"]) for run in found["runs"]] == [("seed=0", 6), ("seed=1", 6)]
    plan = cli.output("run", "walk.yaml", "seed=0,1", "train.steps=9", "--dry-run").splitlines()
    assert "would resume from step 6 and would train steps 7 to 9" in plan[0]


def test_a_sweep_goes_on_after_a_run_that_fails(project: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "failing.yaml").write_text("defaults: walk\nrecipe: walks:forgets\n")
    assert [run["seed"] for run in cli.json("run", "walk.yaml", "seed=0,1", "--print-config")["runs"]] == [0, 1]
    plans = cli.json("run", "walk.yaml", "checkpoint.directory=kept", "seed=0,1", "--dry-run")["runs"]
    assert [plan["checkpoints"] for plan in plans] == ["kept/seed=0", "kept/seed=1"]

    said, errors = said_by(capsys, "run", "failing.yaml", "seed=0,1", "--json", status=1)
    runs = json.loads(said[said.index("{\n") :])["runs"]
    assert [run["name"] for run in runs] == ["seed=0", "seed=1"]
    assert all("must return an Outcome" in run["error"] for run in runs)
    assert errors.endswith("2 of 2 runs failed: seed=0, seed=1\n")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_recipe_that_leaves_the_program_keeps_its_status(project: Path, seed: int) -> None:
    with pytest.raises(SystemExit) as ended:
        run(load_configuration("walk.yaml", ["recipe=walks:leaves", f"seed={seed}"]))
    assert ended.value.code == ("too few walks" if seed else 3)


def test_a_dry_run_looks_at_the_mirror_and_writes_nothing(project: Path, cli: Cli) -> None:
    cli.output("run", "walk.yaml", "checkpoint.mirror=copy")
    (project / "runs").rename(project / "lost")
    mirrored = ("run", "walk.yaml", "checkpoint.mirror=copy", "--dry-run")

    assert "would resume from step 6 and would train steps 7 to 9" in cli.output(*mirrored, "train.steps=9")
    assert "nothing to do: step 6 is saved" in cli.output(*mirrored, "checkpoint.resume=must")
    assert "whose configuration differs" in cli.error(*mirrored, "rate=2.0", status=2)

    assert not (project / "runs").exists()

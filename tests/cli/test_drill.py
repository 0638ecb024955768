"""``holdfast drill``: which interruptions it chooses, and what it finds in programs with and without mistakes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Cli
from tests.cli.programs import PROGRAM
from tests.documents.examples import blocks_of
from tests.starts import run

import holdfast as hf
from holdfast.cli.drill.findings import Causes, Report, StepDifference, Trace, kind_of_state
from holdfast.cli.drill.interruptions import KINDS, DrillOptions, Interruption, choose, places_to_save
from holdfast.engine.fingerprints import STATELESS, Fact, Kind, facts
from holdfast.engine.sources import LeafDifference

pytestmark = pytest.mark.xdist_group("programs")

LAUNCHED = Path(__file__).with_name("launched.py")
EXAMPLES = {block.name: block.text for block in blocks_of("docs/which_interface.md")}
FLAX, LIGHTNING = "python 1", "python 5"
KILL, TERM = signal.SIGKILL, signal.SIGTERM


# ---- which interruptions: pure functions


@pytest.mark.parametrize(
    ("kinds", "at", "validations", "expected"),
    [
        ("first", (), [], ["SIGKILL after step 1", "SIGTERM after step 1"]),
        ("kill", (3, 5), [], ["SIGKILL after step 3", "SIGKILL after step 5"]),
        # A killed run goes back, so the same step can be interrupted once more; one that has saved the step cannot.
        ("kill save term", (4,), [], ["SIGKILL after step 4", "SIGKILL in the save of step 4", "SIGTERM after step 4"]),
        ("twice", (4,), [], ["SIGTERM after step 4", "SIGTERM after step 5"]),
        ("term twice", (4,), [], ["SIGTERM after step 4", "SIGTERM after step 5"]),
        ("twice", (8,), [], ["SIGTERM after step 8"]),
        ("validation", (), [6], ["SIGTERM in the validation after step 6"]),
        (
            "validation",
            (),
            [3, 6],
            [f"SIG{how} in the validation after step {at}" for how, at in (("KILL", 3), ("TERM", 6))],
        ),
        ("validation", (), [], []),
    ],
)
def test_what_is_interrupted(kinds: str, at: tuple[int, ...], validations: list[int], expected: list[str]) -> None:
    options = DrillOptions(kinds=tuple(kind for kind in KINDS if kind in kinds.split()), at=at)
    found, notes = choose(range(1, 9), validations, options)
    assert [str(one) for one in found] == expected
    assert bool(notes) == (not expected)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_are_apart_from_validations(seed: int) -> None:
    """A run that stops right before a validation, or right after one, does not come to it again."""
    steps, validations = list(range(10, 400, 10)), [60, 120, 180]
    found, _ = choose(steps, validations, DrillOptions(seed=seed))
    assert found == choose(steps, validations, DrillOptions(seed=seed))[0]
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert len(found) == len(set(found)) == 9
    validated = [one.step for one in found if one.point == "validation"]
    others = [one.step for one in found if one.point != "validation" and one.step != 10]
    assert (len(validated), len(others)) == (2, 5)
    assert all(abs(one - step) > 10 for one in validated for step in others)
    assert max(one.step for one in found) < steps[-1]


def test_short_runs_and_the_steps_around_likely_interruptions() -> None:
    for count in (2, 3, 4):
        found, _ = choose(range(1, count + 1), [1], DrillOptions())
        assert found[0] == Interruption(KILL, "step", 1)
        assert all(one.step <= count for one in found)
    options = DrillOptions(steps=100)
    likely = {one.step for one in choose(range(1, 101), (), options)[0]}
    assert {one + by for one in likely for by in (0, 1)} <= set(places_to_save(options))
    assert len(places_to_save(options)) < 25


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        ("state/params/attention/key/kernel", "parameters"),
        ("state/opt_state/0/mu/kernel", "optimizer"),
        ("state/optimizer_states/0/state/1/exp_avg", "optimizer"),
        ("state/state_dict/layer.weight", "parameters"),
        ("extras/rng/state/inc", "generator"),
        ("state/holdfast/random/torch", "generator"),
        ("state/holdfast/epoch/loaders/0", "position in the data"),
        ("extras/data/drawn", "position in the data"),
        ("state/step", "counter"),
        ("state/holdfast/callback_metrics/loss", "metrics"),
        ("state/x", "other state"),
    ],
)
def test_the_kind_of_state(leaf: str, kind: str) -> None:
    assert kind_of_state(leaf) == kind


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kinds", "kill,quit"], "--kinds quit: the kinds are first, kill, save, term, twice, validation"),
        (["--signal", "KILL"], "--signal KILL: name a signal that a program can handle"),
        (["--signal", "SIGFOO"], "--signal SIGFOO: name a signal"),
        (["--grace", "soon"], "--grace"),
        (["--steps", "1"], "--steps"),
    ],
)
def test_arguments_that_are_refused(cli: Cli, arguments: list[str], said: str) -> None:
    assert said in cli.error("drill", *arguments, "--", "true", status=2)


def named(*names: str, kind: Kind = "value", where: str = "train.py") -> dict[str, Fact]:
    return {name: Fact(kind, "float", where, "1") for name in names}


TORCH = named("torch's default generator", kind="generator", where="")
LOADER = named("loader", kind="loader")
ADAM = named("adam", kind="optimizer")


@pytest.mark.parametrize(
    ("seen", "differ", "cause", "names"),
    [
        # Times, which change anyway, are left out beside other values; what is only reported comes last.
        (named("started_time", "best", "ema"), {}, "value", ("ema", "best")),
        (named("best_loss", "self.elapsed"), {}, "value", ("best_loss",)),
        (named("elapsed"), {}, "value", ("elapsed",)),
        (named("metrics['loss']", "rate", "wall_time"), {}, "value", ("rate", "metrics['loss']")),
        # A shuffled loader has drawn another number for its order from torch's generator, which no step draws from.
        (LOADER | TORCH, TORCH, "loader", ("loader",)),
        (LOADER | named("rng", kind="generator"), named("rng"), "generator", ("rng",)),
        (ADAM | named("loss", where=""), ADAM, "optimizer", ("adam",)),
    ],
    ids=str,
)
def test_what_the_next_step_depends_on_is_named_first(
    seen: dict[str, Fact], differ: dict[str, Fact], cause: str, names: tuple[str, ...]
) -> None:
    assert cause_of(seen, differ or seen) == (cause, names)


def cause_of(seen: dict[str, Fact], differ: Iterable[str], *leaves: LeafDifference) -> tuple[str, tuple[str, ...]]:
    """Returns what is found where facts differ after a resume; those that say where they are change with each step."""
    moved = {
        name: fact._replace(digest="2") if fact.where and fact.kind != "loader" else fact for name, fact in seen.items()
    }
    others = {name: fact._replace(digest="9") if name in differ else fact for name, fact in seen.items()}
    whole, resumed = (Trace(steps=[3, 4], restored=2, facts={3: first, 4: moved}) for first in (seen, others))
    report = Report(command=[], seed=0, differences=[StepDifference(3, "run", list(leaves))])
    (finding,) = Causes(whole, resumed, (whole, whole)).of(report, [])
    return finding.cause, finding.names


def test_an_optimizer_that_is_saved_differs_as_a_consequence() -> None:
    for leaf, cause in (("state/optimizer/slots/w/exp_avg", "unknown"), ("state/model/w", "optimizer")):
        assert cause_of(ADAM, ADAM, LeafDifference(leaf, "", "values", ""))[0] == cause


def test_a_loader_that_only_a_for_statement_holds() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(1))
    seen: list[set[str]] = []

    def loaders() -> set[str]:
        return {name for name, fact in facts().items() if fact.kind == "loader"}

    handed = hf.resumable(torch.utils.data.DataLoader(data, shuffle=True))
    seen += [loaders() for _ in torch.utils.data.DataLoader(data, shuffle=True)]
    seen += [loaders() for _ in handed]
    seen += [loaders() for _ in torch.utils.data.DataLoader(data)]
    assert (seen, handed.epoch) == ([{"loader = DataLoader(...)"}] + [set()] * 2, 1)


def test_loaders_and_optimizers_in_reach() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    shuffled = torch.utils.data.DataLoader(data, shuffle=True)  # noqa: F841
    ordered = torch.utils.data.DataLoader(data)  # noqa: F841
    bare = torch.utils.data.DataLoader(data, shuffle=True)
    handed = hf.resumable(bare)  # noqa: F841
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([weight])
    generator = torch.get_rng_state()
    before = facts()
    weight.sum().backward()
    adam.step()
    after = facts()
    assert {name for name, fact in after.items() if fact.kind == "loader"} == {"shuffled"}
    changed = {name: (fact.kind, before[name] == fact) for name, fact in after.items() if name == "adam"}
    assert changed == {"adam": ("optimizer", False)}
    assert torch.equal(torch.get_rng_state(), generator), "nothing is drawn"


def test_a_generator_without_a_state_is_a_likely_cause_where_undisturbed_runs_differ() -> None:
    whole = Trace(steps=[3], facts={3: {"rng": Fact("generator", "SystemRandom", "train.py", STATELESS)}})
    differences = [StepDifference(3, "run", [LeafDifference("state", "w", "values", "other values")])]
    report = Report(command=[], seed=0, differences=differences)
    (finding,) = Causes(whole, whole, (whole, whole)).of(report, differences)
    assert (finding.cause, finding.names) == ("unseeded", ("rng",))
    assert "draws from the operating system: `rng` (SystemRandom; train.py). It has no state" in finding.text
    assert "random.Random(seed)" in finding.advice


# ---- real programs


def drill(folder: Path, *arguments: object, status: int = 0) -> dict[str, Any]:
    """Drills a program in a folder; returns the report, with what was said on standard error as ``said``."""
    (folder / "tmp").mkdir(exist_ok=True)
    command = ["-m", "holdfast.cli.main", "drill", "--json", *arguments]
    done = run(*command, cwd=folder, env={**os.environ, "TMPDIR": str(folder / "tmp")})
    assert done.returncode == status, done.stdout + done.stderr
    assert list((folder / "tmp").glob("holdfast*")) == [], "a temporary directory is left"
    return {**(json.loads(done.stdout) if done.stdout else {}), "said": done.stderr}


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_program_that_survives_everything(tmp_path: Path) -> None:
    assert run(*PROGRAM[1:], "run", 5, cwd=tmp_path).returncode == 0
    before = contents(tmp_path / "run")
    report = drill(tmp_path, "--steps", 13, "--keep", "kept", "--", *PROGRAM, "run", 40)

    assert (report["passed"], report["findings"], report["warnings"], report["notes"]) == (True, [], [], [])
    assert [one["step"] for one in report["compared"]] == report["steps"] == list(range(1, 14))
    assert {one["directory"] for one in report["compared"]} == {"run"}
    ended = [one["ended"] for one in report["starts"]]
    assert len(ended) == 10
    assert ended[:2] == ["SIGKILL after step 1", "SIGTERM after step 1"]
    assert [one["began"] for one in report["starts"]][:3] == ["from the beginning", "from the beginning", "from step 1"]
    assert any("in the save" in one for one in ended)
    assert any("in the validation" in one for one in ended)
    assert ended[-1] == "to the end"
    assert "drill: 1 of 9: SIGKILL after step 1" in report["said"]

    assert contents(tmp_path / "run") == before, "the program's own directory"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "kept", "tmp"}
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"reference", "interrupted", "reference.log", "interrupted.log"} <= kept
    error = drill(tmp_path, "--keep", "kept", "--", *PROGRAM, "run", 40, status=2)["said"]
    assert "--keep kept: this already exists" in error


@pytest.mark.parametrize(
    ("mistakes", "cause", "names", "deterministic"),
    [
        ("no-loader", "position", ["batches.drawn"], True),
        ("sum", "nondeterministic", [], False),
        pytest.param("unseeded no-generator", "unseeded", ["noise"], False, marks=pytest.mark.sweep),
    ],
)
def test_the_cause_of_a_difference(
    tmp_path: Path, mistakes: str, cause: str, names: list[str], deterministic: bool
) -> None:
    arguments = ["--steps", 10, "--at", 3, "--kinds", "kill"]
    report = drill(tmp_path, *arguments, "--", *PROGRAM, "run", 40, *mistakes.split(), status=1)
    (finding,) = report["findings"]
    assert (finding["cause"], finding["names"], report["deterministic"]) == (cause, names, deterministic), report
    (first,) = report["differences"]
    found = [(leaf["item"], leaf["path"], leaf["state"]) for leaf in first["leaves"]]
    assert found == [("state", "weights", "parameters")]
    if deterministic:  # at the first step after the first restart
        assert (first["step"], report["starts"][-1]["began"]) == (3, "from step 2")


def test_a_program_that_begins_in_another_way_each_time(tmp_path: Path) -> None:
    """What is not seeded and saved continues exactly: the interrupted run begins with a checkpoint of the first."""
    report = drill(tmp_path, "--steps", 6, "--at", 4, "--", *PROGRAM, "run", 40, "unseeded")
    assert (report["passed"], report["unseeded"]) == (True, ["noise"])
    assert "(noise not seeded): the interrupted run began with the checkpoint of step 1" in report["warnings"][0]
    assert [one["began"] for one in report["starts"]] == ["from step 1", "from step 3", "from step 4"]


def test_a_program_that_ignores_the_signal(tmp_path: Path) -> None:
    arguments = ["--steps", 6, "--at", 3, "--at", 4, "--kinds", "term"]  # One line says it, however often it is so.
    report = drill(tmp_path, *arguments, "--", *PROGRAM, "run", 40, "deaf", status=1)
    assert ([one["cause"] for one in report["findings"]], report["identical"]) == (["ignores_signal"], True)
    one = ["--steps", 3, "--at", 2, "--kinds", "term", "--signal", "usr1"]  # This signal ends it at once.
    report = drill(tmp_path, *one, "--", *PROGRAM, "run", 40)
    assert [one["status"] for one in report["starts"]] == [138, 75]


LOOP = """
import os
import sys
import holdfast as hf
with hf.CheckpointCallback(DIRECTORY, save_interval_steps=1) as checkpoint:
    state, start = checkpoint.restore_or_initialize({"w": 0})
    for step in range(start, 9):
        if checkpoint.on_step(step + 1, {"w": step}).should_stop:
            break
sys.exit(checkpoint.exit_status)
"""
NEVER_RESTORES = """
import numpy as np
import holdfast as hf
with hf.CheckpointManager("run") as manager:
    for step in range(1, 9):
        manager.save(step, {"w": np.full(3, step)})
"""
TWO_RUNS = """
import os
import sys
import numpy as np
import holdfast as hf
hf.load(sys.argv[1])  # the weights of another run are read where they are
os.makedirs("below", exist_ok=True)
os.chdir("below")
options = hf.CheckpointManagerOptions(max_to_keep=1, mirror="../mirror", save_interval_steps=3)
with hf.CheckpointManager("a", options=options) as a, hf.CheckpointManager(os.path.abspath("b")) as b:
    tree = b.restore() if b.all_steps() else {"w": np.zeros(3)}
    for step in range((b.latest_step() or 0) + 1, 9):
        tree = {"w": tree["w"] * 0.9 + step}
        a.save(step, {"twice": 2 * tree["w"]})
        b.save(step, tree)
    a.wait_until_finished()
    hf.save("best", tree, overwrite=True)
    assert (hf.load("a")["twice"] == 2 * hf.load("best")["w"]).all(), "reads what it has written"
"""


@pytest.mark.parametrize(
    ("program", "cause", "said"),
    [
        (
            LOOP.replace("DIRECTORY", 'f"run-{os.getpid()}"'),
            "new_directory",
            "another directory when it is restarted: run-",
        ),
        (NEVER_RESTORES, "not_resumed", "the program started from the beginning again, although step 3 was saved"),
    ],
    ids=["writes elsewhere", "never restores"],
)
def test_a_program_that_begins_anew(tmp_path: Path, program: str, cause: str, said: str) -> None:
    (tmp_path / "train.py").write_text(program)
    report = drill(tmp_path, "--steps", 6, "--at", 4, "--kinds", "kill", "--", sys.executable, "train.py", status=1)
    assert [one["cause"] for one in report["findings"]] == [cause]
    assert said in report["findings"][0]["text"]
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "tmp"}


NO_KEY = {
    "step(state):": "step(state, noise):",
    "- 3 * x) ** 2": "- 3 * x - noise) ** 2",
    "    while step": "    key = jax.random.key(1)\n    while step",
    "        state, metrics = train_step(state)": """        key, drawn = jax.random.split(key)
        state, metrics = train_step(state, jax.random.normal(drawn, x.shape))""",
}
NO_GENERATOR = {
    "Linear(1, 1)\n": "Linear(1, 1)\n        self.noise = torch.Generator().manual_seed(0)\n",
    "3 * batch)": "3 * batch + torch.randn(batch.shape, generator=self.noise))",
}
NO_PLACE = {
    "data = torch": """class Stream(torch.utils.data.IterableDataset):
    position = 0
    def __iter__(self):
        for _ in range(64):
            self.position += 1
            yield torch.tensor([float(self.position % 37)])

data = torch""",
    "torch.linspace(-1, 1, 64)[:, None], batch_size=8, shuffle=True": "Stream(), batch_size=8",
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("example", "changes", "cause", "name"),
    [
        (FLAX, NO_KEY, "generator", "key"),
        (LIGHTNING, NO_GENERATOR, "generator", "trainer.lightning_module.noise"),
        (LIGHTNING, NO_PLACE, "position", "trainer.train_dataloader.dataset.position"),
    ],
    ids=["flax without its key", "lightning without a generator", "lightning without its place in the data"],
)
def test_mistakes_in_the_examples(tmp_path: Path, example: str, changes: dict[str, str], cause: str, name: str) -> None:
    program = EXAMPLES[example]
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new, 1)
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-W", "ignore", "train.py"]
    # The second epoch begins with step 9.
    report = drill(tmp_path, "--steps", 12, "--at", 10, "--kinds", "term", "--", *command, status=1)
    (finding,) = report["findings"]
    assert (finding["cause"], finding["names"][0], report["deterministic"]) == (cause, name, True), report


@pytest.mark.sweep
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", LAUNCHED, "torch", "run", 50]
    report = drill(tmp_path, "--steps", 8, "--at", 4, "--", *command)
    assert report["passed"], report
    assert [one["ended"].split()[0] for one in report["starts"]] == ["SIGKILL", "SIGTERM", "to"]
    assert {one["step"] for one in report["compared"]} >= {4, 5, 8}


JAX_LAUNCHER = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
command = [sys.executable, "launched.py", "jax", "run", "200"]
both = [subprocess.Popen(command, env={**os.environ, "PROCESS": process, "PORT": port}) for process in "01"]
sys.exit(max(abs(process.wait()) for process in both))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("forgets", [False, True])
def test_processes_of_jax(tmp_path: Path, forgets: bool) -> None:
    """A launcher starts both processes; they meet again after each interruption."""
    program = LAUNCHED.read_text(encoding="utf-8")
    change = "change = np.random.default_rng(step).normal(size=64)"
    assert change in program
    if forgets:
        program = program.replace(change, "change = noise.normal(size=64) * 0 + forgotten.normal(size=64)")
        program = program.replace("state: Any", "forgotten = np.random.default_rng(7)\n    state: Any")
    (tmp_path / "launched.py").write_text(program)
    (tmp_path / "launch.py").write_text(JAX_LAUNCHER)
    arguments = ("--steps", 300, "--at", 4, "--", sys.executable, "launch.py")
    report = drill(tmp_path, *arguments, status=int(forgets))
    if not forgets:
        assert report["passed"], report
        assert [one["ended"].split()[0] for one in report["starts"]] == ["SIGKILL", "SIGTERM", "to"]
        assert report["notes"] == []
        return
    assert [(one["cause"], one["names"]) for one in report["findings"]] == [("generator", ["forgotten"])]


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["flax_digits", "lightning_digits"])
def test_recipes(tmp_path: Path, recipe: str) -> None:
    command = [sys.executable, "-m", "holdfast", "run", recipe, "train.steps=400"]
    report = drill(tmp_path, "--steps", 6, "--at", 3, "--", *command)
    assert report["passed"], report
    assert {path.name for path in tmp_path.iterdir()} == {"tmp"}


def test_several_directories_in_another_working_directory(tmp_path: Path) -> None:
    """The program runs to its end, reads back what it has written, and has a mirror, which stays empty."""
    (tmp_path / "train.py").write_text(TWO_RUNS)
    hf.save(tmp_path / "weights", {"w": 1.0})
    arguments = ["--at", 4, "--at", 6, "--kinds", "kill"]
    report = drill(tmp_path, *arguments, "--", sys.executable, "train.py", tmp_path / "weights")
    assert report["passed"], report
    assert report["steps"] == list(range(1, 9)), "it ended by itself"
    assert {one["directory"] for one in report["compared"]} == {"below/a", "below/b"}
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "tmp", "weights", "below"}
    assert list((tmp_path / "below").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", *PROGRAM, "run", 9, "crash@3"], r"failed \(status 1\) without interruption.*a mistake in the program"),
        (["--", *PROGRAM, "run", 1], "ended after one step; a drill needs at least two"),
        (
            ["--", sys.executable, "-c", "print('hi')"],
            r"ended \(status 0\), but reported no step to a manager.*\| hi",
        ),
        (["--steps", 4, "--at", 7, "--", *PROGRAM, "run", 9], "--at 7: the reference run had the steps 1, 2, 3, 4"),
        (["--at", 2, "--steps", 4, "--", *PROGRAM, "run", 9, "fresh"], "when it was restarted .* resume='never'"),
        (
            ["--hang-timeout", "4s", "--", *PROGRAM, "run", 9, "hang@2"],
            r"hangs: no sign of progress .* step 1.*in happen",
        ),
        (["--", "no-such-program"], "cannot start no-such-program: No such file"),
    ],
    ids=["fails", "one step", "no steps", "no such step", "does not start again", "hangs", "does not start"],
)
def test_drills_that_cannot_be_carried_out(tmp_path: Path, arguments: list[object], said: str) -> None:
    error = drill(tmp_path, *arguments, status=2)["said"]
    assert re.search(said, error.partition("holdfast: ")[2], re.DOTALL), error


# A program that starts another one with an environment of its own, and continues regardless of how that one ends.
STARTS = "import os, subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], env=ENVIRONMENT, check=False)\n"
OWN = "{name: os.environ[name] for name in ('PATH', 'PYTHONPATH', 'HOME') if name in os.environ}"
CONTINUES = 'exec(open("child.py").read().replace("real", "own"))'


def test_a_program_with_an_environment_of_its_own(tmp_path: Path) -> None:
    """It is refused; an empty variable says that the program is no part of the rehearsal."""
    (tmp_path / "child.py").write_text(LOOP.replace("DIRECTORY", '"real"'))
    (tmp_path / "parent.py").write_text(STARTS.replace("ENVIRONMENT", OWN) + CONTINUES)
    arguments = ["--steps", 3, "--kinds", "term", "--at", 2, "--", sys.executable, "parent.py"]
    said = drill(tmp_path, *arguments, status=2)["said"]
    assert not (tmp_path / "real").exists()
    assert "started another one in a separate environment, without HOLDFAST_DRILL" in said
    assert "child.py. Pass on the environment (env={**os.environ, ...}" in said
    script = STARTS.replace("ENVIRONMENT", "{**os.environ, 'HOLDFAST_DRILL': ''}")
    environment = {**os.environ, "HOLDFAST_DRILL": str(tmp_path / "rehearsal")}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "real" / "9").is_dir()


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    (tmp_path / "tmp").mkdir()
    program = (
        "import os, signal, subprocess, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open('ready', 'w').write(f'{os.getpid()} {child.pid}')\nsignal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "drill", "--", sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        pids = (tmp_path / "ready").read_text().split()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[1]
    assert (process.returncode, "drill ended by SIGINT" in said) == (130, True), said
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        pytest.param(FLAX, ["--at", 3, "--kinds", "term"], id="flax"),
        pytest.param(FLAX, ["--at", 3], marks=pytest.mark.sweep, id="flax, killed too"),
        # Three starts of Lightning.
        pytest.param(
            LIGHTNING, ["--at", 10, "--kinds", "term", "--steps", 11], marks=pytest.mark.sweep, id="lightning"
        ),
    ],
)
def test_the_examples_of_the_interfaces(tmp_path: Path, example: str, arguments: list[object]) -> None:
    """The one for Lightning draws its weights without a seed; it is interrupted in the middle of its second epoch."""
    (tmp_path / "train.py").write_text(EXAMPLES[example])
    report = drill(tmp_path, "--steps", 5, *arguments, "--", sys.executable, "-W", "ignore", "train.py")
    assert report["passed"], report
    assert report["unseeded"] == ([] if example == FLAX else ["torch's default generator"])
    assert [one["step"] for one in report["compared"]] == report["steps"]
    assert len(report["starts"]) == (2 if "--kinds" in arguments else 3)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "tmp"}

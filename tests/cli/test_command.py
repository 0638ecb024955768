from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.cli.commands import Cli, cut_short, error_of, flip_bits, output_of, said_by
from tests.manager import runs

import holdfast as hf
from holdfast.cli.app import COMMANDS, command
from holdfast.cli.main import main
from holdfast.engine.storage import append_line


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a run directory with three checkpoints of two items."""
    run = tmp_path_factory.mktemp("saved") / "run"
    checkpointers = {
        "state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
        "config": hf.Checkpointer(hf.JsonCheckpointHandler()),
    }
    options = hf.CheckpointManagerOptions(max_to_keep=2, best_fn="loss", best_mode="min", keep_period=20)
    with hf.CheckpointManager(run / "checkpoints", checkpointers, options) as manager:
        for step, loss in ((10, 0.5), (20, 2.0), (30, 1.0)):
            tree = {"params": {"[kernel]": np.full((3, 4), step, np.float32)}, "name": "x", "step": step}
            manager.save(step, {"state": tree, "config": {"a": 1}}, metrics={"loss": loss, "nan": float("nan")})
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# ---- ls


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_ls(cli: Cli, run: Path, place: str) -> None:
    lines = cli.output("ls", run / place).splitlines()
    assert lines[0].split("  ")[0].strip() == "STEP"
    assert [re.split(r"  +", line.strip())[0] for line in lines[1:]] == ["10", "20", "30"]
    for line, said in zip(lines[1:], ("loss 0.5, nan nan", "every 20 steps", "newest"), strict=True):
        assert said in line
        assert line.endswith("ok")
    assert "best loss (0.5)" in lines[1]

    found = cli.json("ls", run / place)
    first, *_ = found["checkpoints"]
    assert found["directory"] == str(run / "checkpoints")
    names = ["step", "path", "time", "bytes", "shared_bytes", "metrics", "reason", "kept", "damage", "witness"]
    assert list(first) == names
    known = {"step": 10, "path": str(run / "checkpoints" / "10"), "kept": ["best loss (0.5)"], "damage": None}
    assert first.items() >= {**known, "metrics": {"loss": 0.5, "nan": None}}.items()
    assert first["bytes"] > 48
    (one,) = cli.json("ls", run / "checkpoints" / "20")["checkpoints"]
    assert (one["step"], one["kept"]) == (20, ["every 20 steps"])

    cut_short(run / "checkpoints" / "20" / "checkpoint.json")
    lines = cli.output("ls", run / place).splitlines()
    assert "damaged: " in lines[2]
    assert [line.rstrip().endswith("ok") for line in lines[1:]] == [True, False, True]
    assert [one["damage"] is None for one in cli.json("ls", run / place)["checkpoints"]] == [True, False, True]


def witness_column(cli: Cli, place: Path, *steps: int) -> list[str | None]:
    """Returns what ls shows for some steps, in both forms."""
    lines = cli.output("ls", place).splitlines()
    checkpoints = cli.json("ls", place)["checkpoints"]
    found = {item["step"]: item["witness"] for item in checkpoints}
    for line in lines[1:]:
        step, before = int(line.split()[0]), line.removesuffix("ok").split()[-1]
        assert before == (found[step] or before)
        assert before not in {"exact", "inexact", "recorded", "rounding"} - {found[step]}
    assert ("WITNESS" in lines[0]) == any(found.values())
    return [found[step] for step in steps]


def test_ls_shows_how_resumes_proved(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train(last: int, **options: Any) -> hf.CheckpointCallback:
        with hf.CheckpointCallback(run, save_interval_steps=4, save_at_end=False, **options) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)})
            for step in range(start + 1, last + 1):
                state = {"w": state["w"] + step}
                checkpoint.on_step(step, state)
        return checkpoint

    train(5, witness=False)
    assert witness_column(cli, run, 4) == [None]
    train(9)
    assert witness_column(cli, run, 4, 8) == [None, "recorded"]
    assert train(11).proof.exact
    assert witness_column(cli, run, 4, 8) == [None, "exact"]
    hf.copy_checkpoint(run, tmp_path / "copy")
    assert witness_column(cli, tmp_path / "copy", 4, 8) == [None, "recorded"]
    for exact, word in ((False, "inexact"), (None, "rounding"), (True, "exact")):
        append_line(
            run / "events.jsonl", json.dumps({"event": "witness", "time": 1e10, "saved_step": 4, "exact": exact})
        )
        assert witness_column(cli, run, 4, 8) == [word, "exact"]
        assert witness_column(cli, run / "4", 4) == [word]
    strange: Any
    for strange in ([], "4", None):
        append_line(run / "events.jsonl", json.dumps({"event": "witness", "time": strange, "saved_step": strange}))
    with hf.CheckpointManager(run) as manager:
        manager.save(8, {"w": np.zeros(2)}, force=True)
    assert witness_column(cli, run, 4, 8) == ["exact", None], "the step was saved anew since"


def test_ls_says_where_else_the_run_has_steps(cli: Cli, tmp_path: Path) -> None:
    run, mirror, local = tmp_path / "run", tmp_path / "mirror", tmp_path / "local"
    runs.saved(run, 1, mirror=str(mirror), local=hf.Local(local, every=1, copies=0))
    *_, third, second, last = cli.output("ls", run).splitlines()
    assert third.endswith("ok")
    # A later start may have neither.
    assert second == f"steps of the run were also copied to a mirror, which `holdfast ls {mirror}` lists"
    assert last == f"the last start with local steps keeps them on its hosts, in {local}"
    assert cli.output("ls", mirror).splitlines()[-1] == f"this is the mirror of {run}"
    found = cli.json("ls", run)
    assert (found["mirror"], found["local"]) == (str(mirror), str(local))
    (run / "1").rename(tmp_path / "1")
    assert cli.output("ls", run).splitlines()[:2] == [f"no checkpoints in {run}", second]


def test_runs_whose_steps_share_files(cli: Cli, tmp_path: Path) -> None:
    """Whole steps are what a copy takes; on the disk, a file with several names counts once, as for du."""
    frozen = np.arange(600_000, dtype=np.float32)
    for name, count in (("lora", 4), ("other", 1)):
        runs.saved(tmp_path / name, *range(count), items=lambda step: {"frozen": frozen, "adapter": np.full(3, step)})
    records = [path.read_bytes() for path in tmp_path.glob("lora/*/checkpoint.json")]
    files = {
        path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("lora/[0-9]/state/**/*") if path.is_file()
    }
    assert len(records) == 4
    lora, other = cli.json("ls", tmp_path)["runs"]
    assert lora["disk_bytes"] == sum(files.values()) < lora["bytes"] / 1.9
    assert lora["bytes"] == sum(one.bytes for one in hf.list_checkpoints(tmp_path / "lora"))
    assert other["disk_bytes"] == other["bytes"]
    lines = cli.output("ls", tmp_path).splitlines()
    assert lines[0].split()[4:7] == ["SIZE", "ON", "DISK"]
    assert lines[1].split()[5:9] == ["9.6", "MB", "4.8", "MB"]


def test_a_directory_of_runs_says_where_checkpoints_are(cli: Cli, run: Path) -> None:
    """A run, a manager's directory, one checkpoint, and what holds none."""
    shutil.copytree(run / "checkpoints", run.parent / "bare")
    shutil.copytree(run / "checkpoints" / "10", run.parent / "chosen")
    (run.parent / "empty" / "checkpoints").mkdir(parents=True)
    (run.parent / "notes.txt").write_text("")
    below = "; there are some in bare, chosen, run\n"

    lines = cli.output("ls", run.parent).splitlines()
    assert lines[0].split() == ["RUN", "CHECKPOINTS", "NEWEST", "AGE", "SIZE", "METRICS", "STATE"]
    assert [line.split()[:3] for line in lines[1:]] == [["bare", "3", "30"], ["chosen", "1", "10"], ["run", "3", "30"]]
    found = cli.json("ls", run.parent)
    assert [(one["name"], one["checkpoints"], one["newest"]["step"]) for one in found["runs"]] == [
        ("bare", 3, 30),
        ("chosen", 1, 10),
        ("run", 3, 30),
    ]
    for word in ("show", "verify"):
        assert cli.error(word, run.parent, status=2).endswith(f"was found{below}")


def test_places_without_checkpoints(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.output("ls", tmp_path / "empty") == f"no checkpoints in {tmp_path}/empty\n"
    assert cli.json("ls", tmp_path / "empty")["checkpoints"] == []
    step = run / "checkpoints" / "10"
    said = f"; it is part of the checkpoint {step}\n"
    assert cli.output("ls", step / "state") == f"no checkpoints in {step}/state{said}"
    assert cli.error("verify", step / "state", status=2).endswith(said)


def test_ls_of_several_directories(cli: Cli, run: Path) -> None:
    other = run.with_name("other")
    shutil.copytree(run / "checkpoints" / "30", other / "30")
    alone = [cli.output("ls", place) for place in (run, other)]
    assert cli.output("ls", run, other) == f"{run / 'checkpoints'}:\n{alone[0]}\n{other}:\n{alone[1]}"
    assert cli.json("ls", run, other)["directories"] == [cli.json("ls", place) for place in (run, other)]


# ---- show


def test_show(cli: Cli, run: Path) -> None:
    lines = [re.split(r"  +", line.strip()) for line in cli.output("show", run).splitlines()]
    assert lines[0] == ["ITEM", "LEAF", "SHAPE", "TYPE", "SHARDING", "SIZE", "VALUE"]
    assert ["state", "params/[kernel]", "[3, 4]", "float32", "48 B"] in lines
    assert ["state", "name", "str", "0 B", "'x'"] in lines
    assert lines[-1][0].startswith(f"{run}/checkpoints/30: 4 leaves, ")
    kernel = {"item": "state", "path": "params/[kernel]", "kind": "numpy", "shape": [3, 4], "dtype": "float32"}
    for place, step in ((run, ()), (run / "checkpoints", ("10",)), (run / "checkpoints" / "20", ())):
        found = cli.json("show", place, *step)
        shown = int(*step) if step else 20 if place.name == "20" else 30
        assert (found["step"], found["path"]) == (shown, str(run / "checkpoints" / str(shown)))
        assert {**kernel, "sharding": "", "bytes": 48, "value": None} in found["leaves"]


def test_a_checkpoint_without_a_manager(cli: Cli, tmp_path: Path) -> None:
    hf.save(tmp_path / "one", {"a": np.zeros(3), "text": "b" * 300})

    lines = cli.output("show", tmp_path / "one").splitlines()
    assert lines[0].split() == ["LEAF", "SHAPE", "TYPE", "SHARDING", "SIZE", "VALUE"]
    assert cli.json("show", tmp_path / "one")["step"] is None
    assert cli.output("ls", tmp_path / "one").splitlines()[1].split()[0] == "-"
    assert "1 whole" in cli.output("verify", tmp_path / "one")


# ---- verify


def test_verify_names_damaged_files_and_leaves(cli: Cli, run: Path) -> None:
    lines = cli.output("verify", run).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 10", "step 20", "step 30", "3 whole"]
    flip_bits(run / "checkpoints" / "20")
    text = cli.output("verify", run, status=1)
    assert "step 10: whole" in text
    assert "step 20: DAMAGED" in text
    assert re.search(r"^  state/d/\w+.*params/\[kernel\]", text, re.MULTILINE)
    assert text.endswith("2 whole, 1 damaged\n")
    assert "damaged" not in cli.output("verify", run, 10)

    found = cli.json("verify", run, status=1)
    assert found["ok"] is False
    assert [(item["step"], item["ok"]) for item in found["checkpoints"]] == [(10, True), (20, False), (30, True)]
    problems = found["checkpoints"][1]["problems"]
    assert {tuple(problem) for problem in problems} == {("file", "leaf", "what")}
    assert any("params/[kernel]" in problem["leaf"] for problem in problems)
    assert cli.json("verify", run, "30")["ok"] is True
    (run / "checkpoints" / "30" / "config" / "data.json").unlink()
    assert "config/data.json" in cli.output("verify", run, 30, status=1)
    cut_short(run / "checkpoints" / "30" / "state" / "tree.json")
    assert str(run / "checkpoints" / "30") in cli.error("show", run, status=1)


# ---- errors

NOT_FOUND = "CheckpointNotFoundError"
BAD_USAGE: dict[str, tuple[str | None, str]] = {  # a line without the first word: the kind of error, and what is said
    "ls /nowhere": (NOT_FOUND, "/nowhere: no such directory; give a run, "),
    "show RUN 7": (NOT_FOUND, "no checkpoint of step 7 here; it holds the steps 10, 20, 30"),
    "verify RUN/..": (NOT_FOUND, "no checkpoint here"),
    "pin RUN/.. 1": (NOT_FOUND, "no checkpoint was found"),
    "pin RUN/checkpoints 99": (NOT_FOUND, "no checkpoint of step 99"),
    "rm RUN/checkpoints 99 --yes": (NOT_FOUND, "no checkpoint of step 99"),
    "rm RUN/checkpoints/20 20": ("OptionError", "this is one checkpoint; give the directory of its"),
    "prune RUN/checkpoints --only": ("OptionError", "--only needs a rule"),
    "report RUN -o RUN": ("OptionError", "this is a directory"),
    "verify RUN x": ("BadParameter", "Invalid value for '[STEP]'"),
    "show RUN -- -1": ("BadParameter", "Invalid value for '[STEP]'"),
    "ls what://x": ("InvalidLocationError", "has an unknown scheme, 'what'"),
    "list": (None, "No such command 'list'."),  # this kind depends on the version of click
    "ls RUN --xml": ("NoSuchOption", "No such option '--xml'."),
    "run": ("MissingParameter", "Missing argument 'CONFIG'."),
    "run flax_digit": ("ConfigError", 'did you mean "flax_digits"?'),
    "run RUN/none.yaml": ("ConfigError", "none.yaml"),
    "run flax_digits train.stesp=3": ("ConfigError", 'train.stesp: unknown key; did you mean "steps"?'),
    "recipes flax_digit": ("OptionError", 'did you mean "flax_digits"?'),
}


@pytest.mark.parametrize("line", BAD_USAGE)
def test_bad_usage_is_one_line_and_status_2(cli: Cli, capsys: pytest.CaptureFixture[str], run: Path, line: str) -> None:
    """With ``--json``, it is a document as well."""
    kind, message = BAD_USAGE[line]
    name, *others = (word.replace("RUN", str(run)) for word in line.split())

    err = cli.error(name, *others, status=2)
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    assert message in err
    out, again = said_by(capsys, name, "--json", *others, status=2)
    found = json.loads(out)
    assert (found["kind"] if kind else None, found["status"]) == (kind, 2)
    assert again == f"holdfast: {found['error']}\n" == err


STEPS = {  # a command with a place for a step: what it prints
    "show RUN": "checkpoints/20: ",
    "verify RUN": "step 20: whole",
    "diff RUN RUN": "/20 are the same, bit for bit",
    "export RUN OUT": "/20 -> ",
    "rm RUN --dry-run": "delete 20: 1 checkpoint",
    "rollback RUN --dry-run": "keep 20: ",
    "pin RUN": "pinned 20",
    "unpin RUN": "unpinned 20",
}


@pytest.mark.parametrize("line", STEPS)
def test_a_step_is_given_by_position_or_by_name(cli: Cli, run: Path, tmp_path: Path, line: str) -> None:
    command, *arguments = line.split()
    for number, step in enumerate((["20"], ["--step", "20"])):
        places = {"RUN": str(run), "OUT": str(tmp_path / f"{number}.safetensors")}
        words = [places.get(word, word) for word in arguments]
        assert STEPS[line] in cli.output(command, *words, *step)
    refused = cli.error(command, *words, "20", "--step", "x", status=2)
    assert refused.endswith(f"(see holdfast {command} --help)\n")


def test_a_step_is_given_once_and_several_in_any_way(cli: Cli, run: Path) -> None:
    assert "give it once" in cli.error("show", run, "20", "--step", "10", status=2)
    assert "Missing argument 'STEP...'" in cli.error("rm", run, status=2)
    assert "delete 10, 20, 30" in cli.output("rm", run, "10", "--step", "20", "--step", "30", "--dry-run")
    for name in ("show", "verify"):
        assert "20" in cli.output(name, run / "checkpoints" / "20", "--step", 20)
        said = cli.error(name, run / "checkpoints" / "20", "--step", 10, status=2)
        assert "this is the checkpoint of step 20, not of step 10: leave out the step" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_for_programs_and_is_in_the_list(name: str) -> None:
    found = command(name)

    assert "--json" in {option for parameter in found.params for option in parameter.opts}
    assert found.help is not None
    assert (found.name, inspect.cleandoc(found.help).partition("\n\n")[0].replace("\n", " ")) == (name, COMMANDS[name])


def test_unexpected_errors_are_one_line_as_well(
    cli: Cli, capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.inspect.describe", Mock(side_effect=ZeroDivisionError("by zero")))

    assert cli.error("show", run, status=1) == "holdfast: ZeroDivisionError: by zero (--traceback shows where)\n"
    assert main(["show", str(run), "--traceback"]) == 1
    assert "cli/inspect.py" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_status_130(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_an_import = ImportError("initialization failed")
    in_an_import.__cause__ = KeyboardInterrupt()
    for error in (in_an_import, KeyboardInterrupt()):
        monkeypatch.setattr("holdfast.cli.inspect.verify_checkpoints", Mock(side_effect=error))
        assert cli.error("verify", run, status=130) == "holdfast: interrupted\n"


def test_a_missing_package_names_the_command_that_installs_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "click", None)

    assert cli.error("recipes", status=1).endswith("[cli]'\n")


# ---- the rest


def test_recipes_and_their_keys(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = cli.output("recipes")
    found = cli.json("recipes")["recipes"]
    assert [recipe["name"] for recipe in found] == ["flax_digits", "flax_text", "lightning_digits", "self_play"]
    assert all(recipe["name"] in text for recipe in found)
    assert list(found[0]) == ["name", "summary", "config", "missing", "install"]

    assert "checkpoint.save_on_best" in cli.output("recipes", "flax_text")
    meaning = "Total number of optimizer updates; may be raised later to continue a finished run."
    assert {"key": "train.steps", "value": 300, "meaning": meaning} in cli.json("recipes", "flax_text")["keys"]

    monkeypatch.chdir(tmp_path)
    assert "\n  steps: 7\n" in cli.output("run", "flax_digits", "train.steps=7", "--print-config")
    assert list(tmp_path.iterdir()) == [], "nothing is run"


def test_help_is_found_where_it_is_looked_for(cli: Cli) -> None:
    text = cli.output()
    assert all(command in text for command in ("run", "recipes", "ls", "show", "verify"))
    assert cli.output("help") == cli.output("-h") == cli.output("--help") == text
    full = cli.output("rm", "--help")
    assert "STEP..." in full
    assert cli.output("help", "rm") == cli.output("rm", "-h") == full
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", cli.output("--version"))
    assert "75 preempted and saved" in " ".join(cli.output("run", "--help").split())


@pytest.mark.parametrize(
    ("shell", "words", "completed"),
    [
        ("bash", "holdfast ro", "plain,rollback\n"),
        ("bash", "holdfast show --tr", "plain,--tree\n"),
        ("zsh", "holdfast recipes l", "plain\nlightning_digits\n_\n"),
        ("zsh", "holdfast un", "plain\nunpin\nReturn checkpoints to the control of the retention rules.\n"),
        ("fish", "holdfast run flax_d", "plain,flax_digits\n"),
    ],
)
def test_the_shell_completes_commands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str, words: str, completed: str
) -> None:
    *_, last = words.split()
    monkeypatch.setenv("_HOLDFAST_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", last if shell == "fish" else str(words.count(" ")))

    assert main([]) == 0
    assert capfd.readouterr().out == completed


@pytest.mark.parametrize(
    ("shell", "script", "startup"),
    [
        ("bash", ".bash_completions/holdfast.sh", ".bashrc"),
        ("zsh", ".zfunc/_holdfast", ".zshrc"),
        ("fish", ".config/fish/completions/holdfast.fish", None),
    ],
)
def test_completion_is_installed_once(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shell: str,
    script: str,
    startup: str | None,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if startup is not None:
        (tmp_path / startup).write_text("alias ll='ls -l'")
    for _ in range(2):
        assert output_of(capfd, "--install-completion").startswith(f"{tmp_path / script}: {shell} will complete ")

    assert "_HOLDFAST_COMPLETE" in (tmp_path / script).read_text()
    assert output_of(capfd, "--show-completion").strip() == (tmp_path / script).read_text().strip()
    if startup is not None:
        lines = (tmp_path / startup).read_text().split("\n")
        assert lines[0] == "alias ll='ls -l'"
        assert len([line for line in lines[1:] if line]) == 1
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert "SHELL=/bin/csh: completion supports only " in error_of(capfd, "--install-completion", status=2)


SLOW = {"asyncio", "email", "http", "importlib.metadata", "pydantic", "rich", "ruamel", "ssl", "tensorstore", "typer"}
FRAMEWORKS = {"flax", "jax", "lightning", "sklearn", "torch"}
ARRAYS = {"numpy", "holdfast.engine.arrays.read", "holdfast.engine.pytree"}
MANAGER = {"holdfast.engine.manager.manager", "holdfast.engine.manager.options", "holdfast.engine.checkpoint.save"}
# What show and verify do without: they load no trees, and write none.
LOADING = {"ml_dtypes", "holdfast.engine.arrays.load", "holdfast.engine.handlers", "holdfast.engine.pytree.template"}
SAVING = {"hashlib", "holdfast.engine.arrays.plan", "holdfast.engine.arrays.write", "holdfast.engine.stateful"}


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (("ls", "RUN/checkpoints"), SLOW | FRAMEWORKS | ARRAYS),
        (("show", "RUN"), SLOW | FRAMEWORKS | MANAGER | LOADING | SAVING),
        (("verify", "RUN"), SLOW | FRAMEWORKS | MANAGER | LOADING | SAVING),
        (("--help",), SLOW | FRAMEWORKS | {"holdfast.engine.manager"}),
        (("recipes",), FRAMEWORKS),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_a_look_at_checkpoints_imports_nothing_that_takes_long(
    run: Path, words: tuple[str, ...], unneeded: set[str]
) -> None:
    arguments = [word.replace("RUN", str(run)) for word in words]
    code = (
        "import os, sys; from holdfast.cli.main import main; environment = {**os.environ}; "
        f"status = main({arguments}); assert os.environ == environment, 'which processes that it starts would have'; "
        f"sys.exit(status or repr({unneeded} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stderr == "set()\n"


def test_a_reader_that_leaves_early_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m holdfast.cli.main show {run} | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)

    assert done.stdout.startswith("ITEM")
    assert done.stderr == ""

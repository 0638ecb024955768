"""The commands and their arguments."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run training recipes, and inspect, verify, convert and delete checkpoints.",
)


def _bundled_names(incomplete: str) -> list[str]:
    """Return the configurations of ours that begin with a text, for the shell; it completes files by itself."""
    from importlib.resources import files

    names = (
        file.name.removesuffix(".yaml") for file in files("holdfast.configs").iterdir() if file.name.endswith(".yaml")
    )
    return sorted(name for name in names if name.startswith(incomplete))


def _step_or_best(text: str) -> int | str:
    """Read the number of a step, or ``best``."""
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither the number of a step nor best")


Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."),
]
Step = Annotated[int | None, typer.Argument(metavar="[STEP]", help="The step.", min=0)]
Command = Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENT]...", help="The program to run.")]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="PATTERN", help="Only leaves whose paths match, such as '**/lora_A/**'."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Run = Annotated[str, typer.Argument(metavar="DIR", help="The directory of a run: a path or URL.")]
Steps = Annotated[list[int], typer.Argument(metavar="STEP...", help="The steps.", min=0)]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="The prefix of the steps, where the directory has several.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    _traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error; accepted anywhere.")
    ] = False,
) -> None:
    # --traceback is declared for --help only: the entry point has handled it already.
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("holdfast"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A YAML file, or a name that 'recipes' lists.", autocompletion=_bundled_names
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Values that override the file, such as train.steps=400; seed=0,1,2 is three runs.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key and value; run nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would be done; run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a recipe; the same command again resumes.

    Exit status: 0 done, 75 preempted and saved (run the same command again), 1 failed, 2 bad usage.
    """
    from .recipes import run_recipe

    return run_recipe(config, overrides or [], print_config=print_config, dry_run=dry_run, as_json=as_json)


@app.command()
def supervise(
    command: Command,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", help="Restarts after crashes and hangs; preemptions are free.", min=0)
    ] = 10,
    pause: Annotated[
        str, typer.Option("--pause", help="Before a restart; doubles with every crash without progress.")
    ] = "1s",
    longest_pause: Annotated[str, typer.Option("--longest-pause", help="The pause does not grow beyond this.")] = "5m",
    hang_timeout: Annotated[
        str | None, typer.Option("--hang-timeout", help="Restart if there is no step within so long, such as 10m.")
    ] = None,
    start_timeout: Annotated[
        str, typer.Option("--start-timeout", help="With --hang-timeout: how long the first step may take.")
    ] = "1h",
    grace: Annotated[
        str, typer.Option("--grace", help="The time between SIGTERM and SIGKILL; slower saves are reported.")
    ] = "30s",
    events: Annotated[
        str | None, typer.Option("--events", metavar="FILE", help="Append the events to a file, as JSON.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a program, and start it again after a preemption, a crash or a hang.

    Write the program after two dashes: holdfast supervise -- python train.py. The run's own events decide whether it
    has finished or was preempted; SIGTERM and other signals are passed on. Every event is a line on standard error: of
    words on a terminal, of JSON elsewhere or with --json. Exit status: that of the program; 75 after a preemption of
    the supervisor itself; 93 if 3 restarts in a row bring no new checkpoint, or 3 starts in a row end within a minute,
    before the run begins.
    """
    from pathlib import Path

    from ..engine.clock import seconds
    from .supervise import RestartPolicy, Watch
    from .supervise import supervise as run_supervised

    policy = RestartPolicy(max_restarts, seconds(pause, name="--pause"), seconds(longest_pause, name="--longest-pause"))
    watch = Watch(
        None if hang_timeout is None else seconds(hang_timeout, name="--hang-timeout"),
        seconds(start_timeout, name="--start-timeout"),
        seconds(grace, name="--grace"),
    )
    return run_supervised(command, policy, watch, None if events is None else Path(events), as_json=as_json)


@app.command()
def drill(
    command: Command,
    steps: Annotated[
        int, typer.Option("--steps", help="How many steps to rehearse; two epochs and a validation tell most.", min=2)
    ] = 20,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", metavar="STEP", help="Interrupt at this step instead of random ones; may be repeated."),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            metavar="KIND,...",
            help="What to rehearse, of: first (the first step), kill, save (killed in a save), term, twice (in a row), "
            "validation. Default: all; with --at, kill and term.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the random steps.")] = 0,
    signal_name: Annotated[
        str, typer.Option("--signal", help="The signal that announces a preemption.", metavar="NAME")
    ] = "SIGTERM",
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="Do not compare leaves such as 'extras/clock*'."),
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Keep the checkpoints and logs in a new directory.")
    ] = None,
    hang_timeout: Annotated[
        str, typer.Option("--hang-timeout", help="Give up if there is no step or other sign of progress for so long.")
    ] = "30m",
    start_timeout: Annotated[str, typer.Option("--start-timeout", help="How long the first step may take.")] = "1h",
    grace: Annotated[str, typer.Option("--grace", help="The time between the signal and SIGKILL.")] = "1m",
    as_json: AsJson = False,
) -> int:
    """Rehearse preemptions of a program, and compare its checkpoints bit for bit.

    Write the program after two dashes: holdfast drill -- python train.py. It runs undisturbed for some steps, and once
    more with SIGTERM and SIGKILL in between, in directories of the drill: those of your runs are neither read nor
    written. Other files that the program writes, such as logs, go where they always go. Exit status: 0 all checkpoints
    are identical, 1 they differ (the report names the likely cause), 2 the drill cannot be carried out.
    """
    from .drill.command import drill as run_drill
    from .drill.interruptions import drill_options

    options = drill_options(
        steps=steps,
        at=at or [],
        kinds=kinds,
        seed=seed,
        polite=signal_name,
        keep=keep,
        ignore=ignore or [],
        hang=hang_timeout,
        first_step=start_timeout,
        grace=grace,
    )
    return run_drill(command, options, as_json=as_json)


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Explain every key of this recipe, or module:function.",
            autocompletion=_bundled_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the available recipes."""
    from .recipes import list_recipes

    return list_recipes(name, as_json=as_json)


@app.command()
def ls(directory: Directory, as_json: AsJson = False) -> int:
    """List the checkpoints of a run, or the runs in a folder.

    For each checkpoint: its age, size and metrics, why it is kept, and whether it is damaged.
    """
    from .inspect import list_steps

    return list_steps(directory, as_json=as_json)


@app.command()
def watch(
    directory: Run,
    interval: Annotated[str, typer.Option("--interval", help="How often to look, such as 10s.")] = "2s",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each change, for programs.")
    ] = False,
) -> int:
    """Follow a run: print its checkpoints as they come and go, until Ctrl-C."""
    from ..engine.clock import seconds
    from .watch import watch_steps

    return watch_steps(directory, max(0.1, seconds(interval, name="--interval")), as_json=as_json)


@app.command()
def prune(
    directory: Run,
    max_to_keep: Annotated[
        int | None, typer.Option("--max-to-keep", help="Keep this many: the best with --best-fn, the newest without.")
    ] = None,
    keep_latest: Annotated[int | None, typer.Option("--keep-latest", help="Keep this many of the newest.")] = None,
    keep_period: Annotated[
        int | None, typer.Option("--keep-period", help="Keep the first at or past each multiple of this many steps.")
    ] = None,
    keep_time_interval: Annotated[
        str | None, typer.Option("--keep-time-interval", help="Keep those this far apart, such as 1h.")
    ] = None,
    keep_step: Annotated[
        list[int] | None, typer.Option("--keep-step", help="Keep this step; may be given several times.")
    ] = None,
    best_fn: Annotated[str | None, typer.Option("--best-fn", help="The metric that ranks checkpoints.")] = None,
    best_mode: Annotated[str | None, typer.Option("--best-mode", help="max or min.")] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Apply the rules given here alone, without those of the run.")
    ] = False,
    prefix: Prefix = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Delete the checkpoints of a run that no rule keeps.

    Rules that are not given here are those of the last run. The newest checkpoint and pinned ones stay.
    """
    from .change import Confirmation, prune_run

    given = {
        "max_to_keep": max_to_keep,
        "keep_latest": keep_latest,
        "keep_period": keep_period,
        "keep_time_interval": keep_time_interval,
        "keep_steps": keep_step,
        "best_fn": best_fn,
        "best_mode": best_mode,
    }
    rules = {name: value for name, value in given.items() if value is not None}
    return prune_run(directory, rules, Confirmation(yes, dry_run), only=only, prefix=prefix, as_json=as_json)


@app.command()
def rm(
    directory: Run,
    steps: Steps,
    prefix: Prefix = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Delete checkpoints of a run, pinned and damaged ones, too."""
    from .change import Confirmation, remove_steps

    return remove_steps(directory, steps, Confirmation(yes, dry_run), prefix=prefix, as_json=as_json)


@app.command()
def rollback(
    directory: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", help="The step to go back to.", min=0)],
    prefix: Prefix = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Delete all checkpoints later than a step, so that the run resumes from it."""
    from .change import Confirmation, roll_back

    return roll_back(directory, step, Confirmation(yes, dry_run), prefix=prefix, as_json=as_json)


@app.command()
def pin(directory: Run, steps: Steps, prefix: Prefix = None, as_json: AsJson = False) -> int:
    """Keep checkpoints until they are unpinned, also if no rule keeps them."""
    from .change import pin_steps

    return pin_steps(directory, steps, pinned=True, prefix=prefix, as_json=as_json)


@app.command()
def unpin(directory: Run, steps: Steps, prefix: Prefix = None, as_json: AsJson = False) -> int:
    """Leave checkpoints to the retention rules again."""
    from .change import pin_steps

    return pin_steps(directory, steps, pinned=False, prefix=prefix, as_json=as_json)


@app.command()
def show(
    directory: Directory,
    step: Step = None,
    select: Select = None,
    statistics: Annotated[
        bool, typer.Option("--stats", help="Read the values: least, greatest, mean, norm, NaN and Inf of each leaf.")
    ] = False,
    as_tree: Annotated[bool, typer.Option("--tree", help="Show containers as a tree, with their sizes.")] = False,
    as_json: AsJson = False,
) -> int:
    """List every leaf of a checkpoint, by default of the newest."""
    from .inspect import show_leaves

    return show_leaves(directory, step, select=select, statistics=statistics, as_tree=as_tree, as_json=as_json)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or the directory of a run: a path or URL.")],
    other: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    step: Annotated[int | None, typer.Option("--step", help="The step of A; by default the newest.", min=0)] = None,
    other_step: Annotated[
        int | None, typer.Option("--other-step", help="The step of B; by default that of A, or the newest.", min=0)
    ] = None,
    rtol: Annotated[
        float, typer.Option("--rtol", help="Relative tolerance; by default bits are compared.", min=0)
    ] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints leaf by leaf: structure, dtypes, shapes and values.

    Exit status: 0 the same, 1 different, 2 they cannot be compared. With a tolerance, NaN equals NaN.
    """
    from .diff import diff_checkpoints

    steps = (step, step if other_step is None else other_step)
    return diff_checkpoints(one, other, steps, rtol=rtol, atol=atol, as_json=as_json)


@app.command()
def report(
    directories: Annotated[
        list[str],
        typer.Argument(metavar="DIR...", help="Runs, folders of runs, or checkpoints: paths or URLs."),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file; an earlier report is replaced.")
    ] = "report.html",
    no_statistics: Annotated[
        bool, typer.Option("--no-stats", help="Read no values: quick, without statistics and norms of leaves.")
    ] = False,
    norm_steps: Annotated[
        int | None,
        typer.Option(
            "--norm-steps", metavar="N", help="Compare the norms of so many kept steps; each is read whole.", min=1
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the life of runs on one page of HTML, which opens from disk without a network.

    It shows the timeline (starts, saves, preemptions, crashes, hangs, fallbacks), metrics with the kept checkpoints,
    sizes, numbers about every leaf and how norms moved, the tree, and why each step is kept. Without --norm-steps,
    8 steps are compared, as far as all earlier ones together have 8 GiB at most.
    """
    from .run_report import write_report

    return write_report(directories, output, statistics=not no_statistics, norm_steps=norm_steps, as_json=as_json)


@app.command()
def verify(directory: Directory, step: Step = None, as_json: AsJson = False) -> int:
    """Check every byte of checkpoints, by default of all steps.

    Exit status 1 if anything is damaged.
    """
    from .inspect import verify_checkpoints

    return verify_checkpoints(directory, step, as_json=as_json)


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A run, a directory of checkpoints, or one checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the copy goes: a path or URL.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other checkpoints at DST.")] = False,
    max_bandwidth: Annotated[
        str | None, typer.Option("--max-bandwidth", metavar="RATE", help="The most to copy, such as '50 MB/s'.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Copy a checkpoint, or a run with all its steps, between disks and object stores.

    Every byte is verified on the way. The same command again goes on with a copy that was interrupted.
    """
    from .convert import copy_checkpoints

    return copy_checkpoints(source, destination, overwrite=overwrite, max_bandwidth=max_bandwidth, as_json=as_json)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The checkpoint of another library: a file or a directory.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the checkpoints go.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")] = False,
    as_json: AsJson = False,
) -> int:
    """Import checkpoints of another library.

    Reads Orbax (one checkpoint or a whole run), safetensors (a file, or a folder with an index), files of torch.save
    and Lightning, folders of torch.distributed.checkpoint, Flax's msgpack files, TensorFlow's checkpoints (a prefix
    such as dir/ckpt-5, or their directory), Keras's .keras and .h5 files, .npz files, and directories of RLlib.
    Nothing in them is ever executed.
    """
    from .convert import import_checkpoints

    return import_checkpoints(source, destination, overwrite=overwrite, as_json=as_json)


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A run, a directory of checkpoints, or one checkpoint.")],
    destination: Annotated[
        str | None, typer.Argument(metavar="[DST]", help="The file, or the directory for orbax; none with --in-place.")
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="safetensors, torch or orbax.")] = "safetensors",
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Only add the small files with which orbax reads it in place.")
    ] = False,
    step: Annotated[
        Any,
        typer.Option("--step", metavar="STEP", parser=_step_or_best, help="A number, or best; by default the newest."),
    ] = None,
    item: Annotated[str | None, typer.Option("--item", help="The item, if there are several.")] = None,
    select: Select = None,
    root: Annotated[
        str | None,
        typer.Option("--root", help="Only what is in this container, such as model, with names that begin there."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> int:
    """Export a checkpoint to the format of another library.

    For orbax, all steps are written unless one is given.
    """
    from .convert import export_checkpoints

    return export_checkpoints(
        source,
        destination,
        to,
        in_place=in_place,
        step=step,
        item=item,
        select=select,
        root=root,
        overwrite=overwrite,
        as_json=as_json,
    )

"""The commands and their arguments."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run training recipes, and inspect, verify and convert checkpoints.",
)

Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."),
]
Step = Annotated[int | None, typer.Argument(metavar="[STEP]", help="The step.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a name that 'recipes' lists.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Values that override the file, such as train.steps=400."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key and value; run nothing.")
    ] = False,
) -> int:
    """Train a recipe; the same command again resumes.

    Exit status: 0 done, 75 preempted and saved (run the same command again), 1 failed, 2 bad usage.
    """
    from .recipes import run_recipe

    return run_recipe(config, overrides or [], print_config=print_config)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain every key of this recipe.")] = None,
    as_json: AsJson = False,
) -> int:
    """List the available recipes."""
    from .recipes import list_recipes

    return list_recipes(name, as_json=as_json)


@app.command()
def ls(directory: Directory, as_json: AsJson = False) -> int:
    """List checkpoints.

    For each: its age, size and metrics, why it is kept, and whether it is damaged.
    """
    from .inspect import list_steps

    return list_steps(directory, as_json=as_json)


@app.command()
def show(directory: Directory, step: Step = None, as_json: AsJson = False) -> int:
    """List every leaf of a checkpoint, by default of the newest."""
    from .inspect import show_leaves

    return show_leaves(directory, step, as_json=as_json)


@app.command()
def verify(directory: Directory, step: Step = None, as_json: AsJson = False) -> int:
    """Check every byte of checkpoints, by default of all steps.

    Exit status 1 if anything is damaged.
    """
    from .inspect import verify_checkpoints

    return verify_checkpoints(directory, step, as_json=as_json)


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
    step: Annotated[int | None, typer.Option("--step", help="The step; by default the newest.", min=0)] = None,
    item: Annotated[str | None, typer.Option("--item", help="The item, if there are several.")] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="PATTERN", help="Only leaves whose paths match, such as '**/lora_A/**'."),
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
        overwrite=overwrite,
        as_json=as_json,
    )

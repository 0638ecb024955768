"""The commands and their arguments."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Runs training recipes, and looks after the checkpoints of training runs.",
)

Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."),
]
Step = Annotated[int | None, typer.Argument(metavar="[STEP]", help="Which step.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    _traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    # --traceback is declared for --help only: the entry point has dealt with it before.
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
        typer.Argument(metavar="[KEY=VALUE]...", help="Values that go over the file, such as train.steps=400."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key and value; run nothing.")
    ] = False,
) -> int:
    """Trains a recipe; the same command again resumes.

    Exit status: 0 done, 75 preempted and saved (run the same command again), 1 failed, 2 bad usage.
    """
    from .run import run_recipe

    return run_recipe(config, overrides or [], print_config=print_config)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain every key of this one.")] = None,
    as_json: AsJson = False,
) -> int:
    """Lists the training recipes that there are."""
    from .recipes import list_recipes

    return list_recipes(name, as_json=as_json)


@app.command()
def ls(directory: Directory, as_json: AsJson = False) -> int:
    """Lists checkpoints.

    For each: its age, size and metrics, why it is kept, and whether it is damaged.
    """
    from .inspect import list_steps

    return list_steps(directory, as_json=as_json)


@app.command()
def show(directory: Directory, step: Step = None, as_json: AsJson = False) -> int:
    """Lists every leaf of a checkpoint.

    By default of the newest.
    """
    from .inspect import show_leaves

    return show_leaves(directory, step, as_json=as_json)


@app.command()
def verify(directory: Directory, step: Step = None, as_json: AsJson = False) -> int:
    """Reads and checks every byte.

    By default of all steps. Exit status 1 if anything is damaged.
    """
    from .inspect import verify_checkpoints

    return verify_checkpoints(directory, step, as_json=as_json)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What another library wrote: a file or a directory.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the checkpoints go.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    as_json: AsJson = False,
) -> int:
    """Makes checkpoints of another library into checkpoints of holdfast.

    Reads Orbax (one checkpoint or a whole run), safetensors (a file, or a folder with an index), files of torch.save
    and Lightning, folders of torch.distributed.checkpoint, Flax's msgpack files, and TensorFlow's checkpoints (a
    prefix such as dir/ckpt-5, or their directory). Nothing in them is ever run.
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
        bool, typer.Option("--in-place", help="Only add the small files that make orbax read it where it is.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="Which step; by default the newest.", min=0)] = None,
    item: Annotated[str | None, typer.Option("--item", help="Which item, if there are several.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> int:
    """Writes a checkpoint for other libraries to read.

    For orbax, all steps are written unless one is given.
    """
    from .convert import export_checkpoints

    return export_checkpoints(
        source, destination, to, in_place=in_place, step=step, item=item, overwrite=overwrite, as_json=as_json
    )

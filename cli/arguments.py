"""The arguments and options that several commands share."""

from __future__ import annotations

import click

directory = click.argument(
    "directory", metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."
)
run_directory = click.argument("directory", metavar="DIR", help="The directory of a run: a path or URL.")
source = click.argument("source", metavar="SRC", help="A run, a directory of checkpoints, or one checkpoint.")
step = click.argument("step", metavar="[STEP]", type=click.IntRange(min=0), required=False, help="The step.")
steps = click.argument(
    "steps", metavar="STEP...", type=click.IntRange(min=0), nargs=-1, required=True, help="The steps."
)
program = click.argument(
    "command", metavar="-- PROGRAM [ARGUMENT]...", nargs=-1, required=True, help="The program to run."
)
select = click.option(
    "--select", metavar="PATTERN", multiple=True, help="Only leaves whose paths match, such as '**/lora_A/**'."
)
prefix = click.option("--prefix", help="The prefix of the steps, where the directory has several.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run = click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

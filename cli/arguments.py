"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Directory = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."),
]
Run = Annotated[str, typer.Argument(metavar="DIR", help="The directory of a run: a path or URL.")]
Source = Annotated[str, typer.Argument(metavar="SRC", help="A run, a directory of checkpoints, or one checkpoint.")]
Step = Annotated[int | None, typer.Argument(metavar="[STEP]", help="The step.", min=0)]
Steps = Annotated[list[int], typer.Argument(metavar="STEP...", help="The steps.", min=0)]
Command = Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENT]...", help="The program to run.")]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="PATTERN", help="Only leaves whose paths match, such as '**/lora_A/**'."),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="The prefix of the steps, where the directory has several.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

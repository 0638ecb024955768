"""The command list, in the order shown by ``holdfast --help``, and shell completion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from ..engine import __version__
from ..engine.errors import OptionError
from .streams import say

COMMANDS = {
    "run": "Train a recipe; the same command again resumes.",
    "supervise": "Run a program, and start it again after a preemption, a crash or a hang.",
    "drill": "Rehearse preemptions of a program, and compare its checkpoints bit for bit.",
    "recipes": "List the available recipes.",
    "ls": "List the checkpoints of runs, or the runs in a folder.",
    "watch": "Follow a run: print its checkpoints as they come and go, until Ctrl-C.",
    "prune": "Delete the checkpoints of a run that no rule keeps.",
    "rm": "Delete checkpoints of a run, including pinned and damaged ones.",
    "rollback": "Delete all checkpoints later than a step, so that the run resumes from it.",
    "pin": "Keep checkpoints until they are unpinned, even if no rule keeps them.",
    "unpin": "Return checkpoints to the control of the retention rules.",
    "show": "List every leaf of a checkpoint, by default of the newest.",
    "diff": "Compare two checkpoints leaf by leaf: structure, dtypes, shapes and values.",
    "report": "Write a report on runs as one HTML page, which opens without a network connection.",
    "verify": "Check every byte of checkpoints, by default of all steps.",
    "cp": "Copy a checkpoint, or a run with all its steps, between disks and object stores.",
    "import": "Import checkpoints of another library.",
    "export": "Export a checkpoint to the format of another library.",
}
_MODULES = {  # command names, keyed by the module that defines them
    "listing": "ls watch",
    "inspect": "show diff verify",
    "change": "prune rm rollback pin unpin",
    "convert": "cp import export",
    "recipes": "run recipes",
    "supervise": "supervise",
    "drill.command": "drill",
    "run_report": "report",
}
_NAME, _COMPLETE = "holdfast", "_HOLDFAST_COMPLETE"  # command name; environment variable that requests completions
_SCRIPTS = {  # keyed by shell: path of the completion script, path of the startup file, and the line to add to it
    "bash": (".bash_completions/holdfast.sh", ".bashrc", "source ~/.bash_completions/holdfast.sh"),
    "zsh": (".zfunc/_holdfast", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/holdfast.fish", None, ""),
}


def execute(arguments: Sequence[str]) -> int:
    """Run a command or answer a shell's completion request, and return the exit status."""
    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(_app, {}, _NAME, _COMPLETE, instruction)
    try:
        words = list(arguments) or ["--help"]
        words = [*words[1:], "--help"] if words[0] == "help" else words
        with _app.make_context(_NAME, words) as context:
            status: int = _app.invoke(context)
            return status
    except click.exceptions.Exit as ended:  # raised by --help and --version
        return ended.exit_code
    except click.Abort as error:  # raised by Ctrl-C at a prompt
        raise KeyboardInterrupt from error


def command(name: str) -> click.Command:
    """Import and return one command, but no modules of other commands, because importing them would be slow."""
    module = next(module for module, names in _MODULES.items() if name in names.split())
    if module == "inspect":
        _import_numpy()
    imported: click.Command = getattr(import_module(f".{module}", __package__), name + "_" * (name == "import"))
    return imported


def _import_numpy() -> None:
    """Import numpy with a single OpenBLAS thread, which is faster. No other module may import numpy earlier."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import numpy  # noqa: F401

    if threads is None:
        del os.environ["OPENBLAS_NUM_THREADS"]  # hide the variable from the caller of `main` and child processes


class _Unloaded(click.Command):
    """A placeholder that imports its command only when a user runs it or a shell requests its completions."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        assert self.name is not None
        return command(self.name).make_context(info_name, args, parent, **extra)


class _App(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)


def _set_up_completion(context: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print or install the shell completion script."""
    if not asked:
        return
    shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SCRIPTS:
        raise OptionError(f"SHELL={os.environ.get('SHELL', '')}: completion supports only {', '.join(_SCRIPTS)}")
    from click.shell_completion import get_completion_class

    shell_class: Any = get_completion_class(shell)
    script = shell_class(_app, {}, _NAME, _COMPLETE).source()
    if option.name == "show_completion":
        click.echo(script)
        context.exit()
    from pathlib import Path  # imported lazily, because only installation needs it

    relative, startup, line = _SCRIPTS[shell]
    path = Path.home() / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    if startup is not None:
        with (Path.home() / startup).open("a+", encoding="utf-8") as file:
            file.seek(0)
            if line not in file.read():
                file.write(f"\n{line}\n")
    say(f"{path}: {shell} will complete the command in new terminals")
    context.exit()


def _flag(name: str, text: str, **more: Any) -> click.Option:
    return click.Option([name], is_flag=True, expose_value=False, is_eager=True, help=text, **more)


_app = _App(
    help="Run training recipes, and inspect, verify, convert and delete checkpoints.",
    epilog="holdfast help COMMAND, or holdfast COMMAND -h, shows the arguments of a command.",
    commands=[_Unloaded(name, short_help=text) for name, text in COMMANDS.items()],
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    params=[
        # The entry point has already handled --traceback; this option only adds it to the help text.
        _flag("--traceback", "Print the traceback of an error; accepted anywhere."),
        _flag(
            "--install-completion", "Install completion for the shell that SHELL names.", callback=_set_up_completion
        ),
        _flag("--show-completion", "Print the script for it.", callback=_set_up_completion),
    ],
)
click.version_option(__version__, message="%(version)s", help="Print the version and exit.")(_app)

"""Writes all pages of the site into a folder: the ones in ``docs/``, and those generated from the code.

``python -m docs.tools.prepare build/pages`` copies the pages, and generates the reference of names, commands, keys of
the YAML and options. ``make docs`` runs it, and then MkDocs on that folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .runtime import as_markdown

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the reference of names: names of ``holdfast`` itself, by the packages they come from, then modules."""

    title: str
    text: str
    packages: Sequence[str] = ()
    modules: Sequence[str] = ()


PAGES: Mapping[str, Page] = {
    "callback": Page(
        "The callback for loops", "For any training loop.", ["integrations.loop", "engine.loaders", "engine.resumable"]
    ),
    "files": Page(
        "Save, load, list, verify",
        "Functions for one checkpoint or a directory of them.",
        ["engine.api", "engine.sources.opening", "engine.inspection", "engine.listing"],
    ),
    "managers": Page("Managers", "Many checkpoints of one run: when to save and what to keep.", ["engine.manager"]),
    "handlers": Page(
        "Checkpointers and handlers",
        "How one item is written, and types of your own.",
        ["engine.checkpoint", "engine.handlers", "engine.arrays"],
        ["handlers", "type_handlers", "checkpoint_utils"],
    ),
    "trees": Page("Trees", "Trees under other names.", ["engine.pytree"]),
    "convert": Page(
        "Formats of other libraries",
        "Import and export.",
        ["integrations.formats.convert", "integrations.formats.orbax.export"],
    ),
    "reports": Page(
        "Results and progress", "What functions and methods return, and how far they are.", modules=["reports"]
    ),
    "processes": Page("Processes", "Programs of several processes.", modules=["processes"]),
    "places": Page(
        "Places, time, observers", "Paths, URLs, clocks, observers.", modules=["storage", "clock", "observer"]
    ),
    "errors": Page(
        "Errors", "What holdfast raises on purpose is a `HoldfastError`.", ["engine.errors"], modules=["errors"]
    ),
    "graph": Page("Checkpoints of objects", "[The guide](../../graphs.md) has examples.", modules=["graph"]),
    "components": Page("Trees of components", "[The guide](../../components.md) has examples.", modules=["components"]),
    "recipes": Page("Recipes", "[The guide](../../recipes.md) has examples.", modules=["recipes"]),
}


def public_names(module: str) -> list[str]:
    """Return the public names of a module; ``from holdfast import *`` leaves out ``open``."""
    return sorted([*importlib.import_module(module).__all__, *(["open"] if module == "holdfast" else [])])


def public_modules() -> list[str]:
    """Return the modules whose names are public, ``holdfast`` first."""
    of_pages = [f"holdfast.{module}" for page in PAGES.values() for module in page.modules]
    return ["holdfast", *of_pages, *integrations()]


def integrations() -> list[str]:
    """Return the modules of ``holdfast.integrations`` with public names; ``loop`` has those of ``holdfast`` itself."""
    package = importlib.import_module("holdfast.integrations")
    names = [one.name for one in pkgutil.iter_modules(package.__path__) if one.name != "loop" and one.name[0] != "_"]
    found = [f"{package.__name__}.{name}" for name in names]
    return [name for name in found if hasattr(importlib.import_module(name), "__all__")]


def api_pages() -> dict[str, str]:
    """Return the pages of the reference of names, by their file names.

    Raises:
        LookupError: No page covers a public name of ``holdfast``, or one of its modules.
    """
    import holdfast

    covered = {f"holdfast.{package}": file for file, page in PAGES.items() for package in page.packages}
    modules = {module for page in PAGES.values() for module in page.modules}
    names: dict[str, list[str]] = {file: [] for file in PAGES}
    for name in public_names("holdfast"):
        value = getattr(holdfast, name)
        if name in modules:
            continue
        home = value.__name__ if inspect.ismodule(value) else value.__module__
        found = [file for package, file in covered.items() if f"{home}.".startswith(f"{package}.")]
        if not found:
            raise LookupError(f"holdfast.{name} comes from {home}: add that to PAGES in {Path(__file__).name}")
        names[found[0]].append(f"holdfast.{name}")
    documented: dict[Any, str] = {}
    pages = {file: [page.text, _entries(names[file], documented)] for file, page in PAGES.items()}
    for file, page in PAGES.items():
        pages[file] += [_section(f"holdfast.{module}", documented) for module in page.modules]
    of_frameworks = [_section(module, documented) for module in integrations()]
    pages["integrations"] = of_frameworks
    titles = {file: page.title for file, page in PAGES.items()} | {"integrations": "Callbacks of frameworks"}
    return {f"{file}.md": "\n\n".join([f"# {titles[file]}", *filter(None, parts)]) for file, parts in pages.items()}


def _section(module: str, documented: dict[Any, str]) -> str:
    """Return the section of a module: what its docstring says first, and its public names."""
    text = inspect.getdoc(importlib.import_module(module)) or ""
    summary = as_markdown(text).partition("\n\n")[0]
    names = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    return f"## {module}\n\n{summary}\n\n{_entries(names, documented)}"


def named(name: str) -> Any:
    """Return the object of a dotted name that begins with a module."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except ModuleNotFoundError:
        return getattr(named(module), last)


def _entries(names: list[str], documented: dict[Any, str]) -> str:
    """Return what asks mkdocstrings for the documentation of names; a second name of an object leads to the first."""
    entries = []
    for name in names:
        value = named(name)
        first = documented.get(value) if callable(value) else None
        if first is not None:
            entries.append(f"`{name}` is [`{first}`][{first}] under another name.\n")
        else:
            documented[value] = name
            entries.append(f"::: {name}\n")
    return "\n".join(entries)


def commands_page() -> str:
    """Return the page of the command and its subcommands."""
    import click

    from holdfast.cli.app import COMMANDS, command

    parts = [
        "# The command\n",
        "`holdfast --help` and `holdfast COMMAND --help` print the same. `--traceback`, accepted anywhere, prints the "
        "traceback of an error. `python -m holdfast` is the same command. `holdfast --install-completion` teaches your "
        "shell its names.\n",
        "| command | what it does |\n|---|---|",
    ]
    parts += [f"| [`{name}`](#holdfast-{name}) | {_cell(text)} |" for name, text in COMMANDS.items()]
    parts.append(
        "\n## Exit status\n\n| status | meaning |\n|---|---|\n| 0 | done; of `diff`, the same; of `verify`, whole |\n"
        "| 1 | failed; of `diff`, different; of `verify`, damaged |\n"
        "| 2 | bad usage: an unknown option, a mistake in a configuration, a checkpoint that is not there |\n"
        "| 75 | preempted, and saved: run the same command again |\n"
        "| 93 | `supervise`: restarts bring no new checkpoint |\n"
        "| 128 and a number | ended by that signal, such as 130 after Ctrl-C |\n"
    )
    for name in COMMANDS:
        found = command(name)
        context = click.Context(found, info_name=name)
        arguments = [one.make_metavar(context) for one in found.params if isinstance(one, click.Argument)]
        usage = " ".join(["holdfast", name, "[OPTION]...", *arguments])
        parts.append(f"## holdfast {name}\n\n```text\n{usage}\n```\n\n{inspect.cleandoc(found.help or '')}\n")
        rows = [row for one in found.params if (row := _parameter(one, context)) is not None]
        if rows:
            parts.append("\n".join(["| argument or option | meaning | default |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _parameter(parameter: Any, context: Any) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return None
    name = parameter.metavar if parameter.param_type_name == "argument" else record[0]
    default = parameter.to_info_dict()["default"]
    shown = "" if default in (None, False, (), []) else f"`{default}`"
    return f"| `{_cell(re.sub(r'  +', ' ', name))}` | {_cell(parameter.help or '')} | {shown} |"


def _cell(text: str) -> str:
    text = re.sub(r"(?<![`\w])('\*\*[^']*')", r"`\1`", " ".join(text.split()))
    return text.replace("|", "\\|")


def yaml_page() -> str:
    """Return the page of the keys that recipes read."""
    from holdfast.recipes.registry import RECIPES
    from holdfast.recipes.schema import Config

    parts = [
        "# Keys of a recipe's YAML\n",
        "`holdfast recipes NAME` prints the keys of a recipe, `holdfast run NAME --print-config` the values that a run "
        "would have, and `key=value` on the command line overrides the file. A wrong key, type or value is an error "
        "with file, line and key, before anything starts. [Recipes](../recipes.md) has the rest.\n",
        "## Keys of every recipe\n",
        _table(_keys(Config)),
    ]
    shared = {key for key, *_ in _keys(Config)}
    for recipe in RECIPES.values():
        own = [row for row in _keys(recipe.schema) if row[0] not in shared]
        needs = f"pip install 'holdfast-checkpoint[recipes,{recipe.extra}]'"
        parts += [f"## {recipe.name}\n", f"Trains {recipe.summary}. Install: `{needs}`\n", _table(own)]
        if recipe.schema.METRICS:
            parts.append(f"Metrics for `best_fn`: {', '.join(f'`{one}`' for one in recipe.schema.METRICS)}.\n")
    return "\n".join(parts)


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = [f"| `{key}` | {kind} | {default} | {_cell(meaning)} |" for key, kind, default, meaning in rows]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *lines, ""])


def _keys(model: Any) -> list[tuple[str, str, str, str]]:
    schema = model.model_json_schema()
    return list(_schema_keys(schema, schema, dict(_defaults(model)), ""))


def _defaults(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if hasattr(type(value), "model_fields"):
            yield from _defaults(type(value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _schema_keys(
    root: Any, section: Any, defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    for name, given in section["properties"].items():
        field = given
        for one in (given, *given.get("allOf", ())):  # pydantic before 2.9 has sections in there
            if "$ref" in one:
                field = {**_referred(root, one["$ref"]), **given}
        if "properties" in field:
            yield from _schema_keys(root, field, defaults, f"{prefix}{name}.")
            continue
        required = name in section.get("required", ())
        value = defaults.get(f"{prefix}{name}", field.get("default"))
        default = "required" if required else f"`{_yaml(value)}`"
        yield f"{prefix}{name}", _kind(root, field), default, field.get("description", "")
        for one in field.get("anyOf", ()):
            if "$ref" in one:
                yield from _schema_keys(root, _referred(root, one["$ref"]), defaults, f"{prefix}{name}.")


def _referred(root: Any, reference: str) -> Any:
    return root["$defs"][reference.rpartition("/")[2]]


def _kind(root: Any, field: Any) -> str:
    """Return in words which values JSON schema allows."""
    if "anyOf" in field:
        return " or ".join(_kind(root, one) for one in field["anyOf"])
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
    if field.get("type") == "array":
        return f"list of {_kind(root, field['items'])}"
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    said = [f"{text} {field[limit]}" for limit, text in limits.items() if limit in field]
    return " ".join([words.get(field.get("type"), "number or text"), *said])


def _yaml(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def options_page() -> str:
    """Return the page of the options that managers, callbacks and recipes share."""
    from holdfast import CheckpointCallback, CheckpointManagerOptions, Local, Mirror
    from holdfast.engine.manager import CheckpointOptions, option_texts
    from holdfast.integrations.lightning import CheckpointCallback as LightningCallback
    from holdfast.integrations.options import CallbackOptions

    def names(options: type) -> list[str]:
        return list(inspect.signature(options).parameters)

    def rows(taker: type, options: Iterable[str]) -> str:
        found = ["| option | default | meaning |", "|---|---|---|"]
        texts, parameters = option_texts(taker), inspect.signature(taker).parameters
        for name in options:
            default = repr(parameters[name].default).replace("<factory>", "{}")
            given = "required" if parameters[name].default is inspect.Parameter.empty else f"`{default}`"
            found.append(f"| `{name}` | {given} | {_cell(texts[name].replace('``', '`'))} |")
        return "\n".join(found) + "\n"

    def further(callback: type) -> str:
        known = {*names(CallbackOptions), "unknown"}
        return ", ".join(f"`{one}`" for one in names(callback) if one not in known)

    shared, of_callbacks = names(CheckpointOptions), names(CallbackOptions)

    return "\n".join(
        [
            "# Options\n",
            "Options are declared once: a manager, every callback and the `checkpoint:` section of a recipe's YAML "
            "take them under the same names, with the same defaults and effects. Triggers add up: a step is saved when "
            "any of them asks for it. Rules add up, too: a step is kept when any of them wants it, and the newest is "
            "always kept. An unknown name is an error that says what the name of another library is called here.\n",
            "## Of managers, callbacks and recipes\n",
            rows(CheckpointManagerOptions, shared),
            "Without a trigger, a manager saves every step that it is given, and a callback saves every 15 minutes.\n",
            "## Of callbacks and recipes\n",
            rows(CheckpointCallback, [one for one in of_callbacks if one not in shared]),
            "## Of managers only\n",
            rows(CheckpointManagerOptions, [one for one in names(CheckpointManagerOptions) if one not in shared]),
            "## Of a mirror\n",
            rows(Mirror, names(Mirror)),
            "## Of local steps\n",
            rows(Local, names(Local)),
            "## Of single callbacks\n",
            f"[`holdfast.CheckpointCallback`][holdfast.CheckpointCallback] also takes {further(CheckpointCallback)}.\n",
            "[`holdfast.integrations.lightning.CheckpointCallback`]"
            "[holdfast.integrations.lightning.CheckpointCallback] "
            f"also takes {further(LightningCallback)}.\n",
        ]
    )


def copied_page(name: str) -> str:
    """Return a page that lies beside ``docs/``, with links that are right on the site."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/([^)]+\.md[^)]*)\)", r"](\1)", text)
    repository = PROJECT["urls"].get("Repository")
    linked = r"\1" if repository is None else rf"[\1]({repository}/blob/main/\2)"
    return re.sub(r"\[([^]]+)\]\((?!https?:|#|[\w/]+\.md)([^)]+)\)", linked, text)


def prepare(folder: Path) -> None:
    """Write all pages into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("tools", "__pycache__"))
    pages = {f"reference/api/{name}": text for name, text in api_pages().items()}
    pages |= {
        "reference/commands.md": commands_page(),
        "reference/yaml_keys.md": yaml_page(),
        "reference/options.md": options_page(),
        "changelog.md": copied_page("CHANGELOG.md"),
        "contributing.md": copied_page("CONTRIBUTING.md"),
    }
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))

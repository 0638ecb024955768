"""Gives mkdocstrings the documentation that the code completes when it runs, such as the options of callbacks."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe


class RuntimeDocumentation(griffe.Extension):
    """Takes docstrings and signatures from the imported package, and writes them in Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Complete the public names of a package once it is read; that it calls others is griffe's convention."""
        if pkg.name != "holdfast":
            return
        from .prepare import public_modules

        for module in public_modules():
            self._complete(pkg, module)

    def _complete(self, package: griffe.Module, module: str) -> None:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            target: Any = package[f"{module}.{name}".removeprefix("holdfast.")]
            target = target.final_target if target.is_alias else target
            if not target.is_module:
                self._describe(target, value)

    def _describe(self, target: Any, value: Any) -> None:
        text = inspect.getdoc(value) if target.is_class or target.is_function else None
        if text is not None and target.docstring is not None:
            target.docstring.value = text
        if target.is_class and "__init__" in target.members and not target.members["__init__"].is_alias:
            _take_signature(target.members["__init__"], value)
        for one in (target, *target.members.values()):
            if not one.is_alias and one.docstring is not None:
                one.docstring.value = as_markdown(one.docstring.value)


def _take_signature(init: Any, value: Any) -> None:
    """Give a constructor that a decorator makes the parameters that it has."""
    taken = list(inspect.signature(value.__init__).parameters.values())[1:]
    own = [one.name for one in init.parameters]
    positional = init.parameters[0].kind is griffe.ParameterKind.positional_only  # which griffe takes for an argument
    if own[1:] == [one.name for one in taken] and not positional:
        return
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for one in taken:
        annotation = None if one.annotation is inspect.Parameter.empty else _type(one.annotation)
        default = None if one.default is inspect.Parameter.empty else _shown(one.default)
        kind = griffe.ParameterKind[one.kind.name.lower()]
        parameters.append(griffe.Parameter(one.name, annotation=annotation, kind=kind, default=default))
    init.parameters = griffe.Parameters(*parameters)


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | bool | tuple | None) else "..."


def as_markdown(text: str) -> str:
    """Return a docstring with the roles and literal blocks of reStructuredText written in Markdown.

    >>> as_markdown("See :class:`~holdfast.Mirror` and ``load``::\\n\\n    x = 1\\n\\nEnd.")
    'See `Mirror` and `load`:\\n\\n```python\\nx = 1\\n```\\n\\nEnd.'
    """
    text = re.sub(r":\w+:`~(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`([\w.]+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(
        r"^( *)(.*?)::\n\n((?:\1 {4,}.*\n?|[ ]*\n)+)", lambda found: _fenced(*found.groups()), text, flags=re.MULTILINE
    )


def _fenced(indent: str, before: str, code: str) -> str:
    body = textwrap.dedent(code).strip("\n")
    lead = f"{indent}{before}:\n\n" if before else ""
    block = textwrap.indent(f"```python\n{body}\n```", indent)
    return f"{lead}{block}\n\n"

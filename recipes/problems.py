"""Configuration errors. An error reports all problems of a configuration at once, each with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..engine.errors import OptionError, did_you_mean, shortened_text

KeyPath = tuple[str | int, ...]

# Messages about configurations show names in double quotes, as YAML writes them.
closest_name = partial(did_you_mean, shown='"{}"')


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The origin of a key: a line of a file, or a command-line argument."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A configuration problem: its origin, its key, and a text stating what was expected and what was found."""

    origin: SourceLine
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.key, self.text) if part)


class ConfigError(OptionError):
    """Raised for an invalid configuration; the message lists all problems in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


def dotted(path: KeyPath) -> str:
    """Format a key path as on the command line, such as ``model.hidden.0``."""
    return ".".join(map(str, path))


def as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def described(value: object) -> str:
    """Describe a value for an error message: its type and its text, shortened if long."""
    match value:
        case None:
            return "nothing"
        case str():
            return f'the text "{shortened_text(value)}"'
        case dict():
            return f"a section ({shortened_text(', '.join(map(str, value)))})" if value else "an empty section"
        case list():
            return f"the list {shortened_text(str(value))}"
        case _:
            return shortened_text(as_yaml(value))

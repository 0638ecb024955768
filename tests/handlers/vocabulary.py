"""Leaves of a type of the user's own, and their handler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import holdfast as hf

ParamInfo = hf.type_handlers.ParamInfo
Registry = hf.type_handlers.TypeHandlerRegistry


@dataclass
class Vocabulary:
    """A leaf that would be a container without its handler."""

    words: list[str] = field(default_factory=list)


class VocabularyHandler(hf.type_handlers.TypeHandler):
    """Files in the folder of the leaf."""

    name = "vocabulary"

    def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> list[ParamInfo]:
        for value, name in zip(values, names, strict=True):
            if not all(isinstance(word, str) for word in value.words):
                raise hf.errors.UnsupportedLeafError(f"{name}: words are text")
        facts = [{"count": len(value.words), "class": type(value).__name__} for value in values]
        return [ParamInfo(name=name, facts=fact) for name, fact in zip(names, facts, strict=True)]

    def serialize(self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[hf.SaveArgs]) -> Any:
        for value, info in zip(values, infos, strict=True):
            assert info.folder is not None
            for number, word in enumerate(value.words):
                (info.folder / f"{number}.txt").write_bytes(word.encode())

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[hf.RestoreArgs]) -> Any:
        found = []
        for info, asked in zip(infos, args, strict=True):
            assert info.folder is not None
            words = [(info.folder / f"{number}.txt").read_bytes().decode() for number in range(info.facts["count"])]
            found.append(words if asked.restore_type is not None else Vocabulary(words))
        return found


def trees_with(handler: hf.type_handlers.TypeHandler, **options: Any) -> hf.PyTreeCheckpointHandler:
    """A handler of trees in which vocabularies are leaves."""
    return hf.PyTreeCheckpointHandler(type_handler_registry=Registry({Vocabulary: handler}), **options)

"""Which hosts keep copies of each other's files, and which local step is whole across the hosts that are there.

Pure functions: what each host has comes in, and what to do comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..format import RECORD, CheckpointRecord, FileRecord

OWN = "own"  # the folder of what the processes of a host have written
COPIES = "copies"  # the folder of what other hosts have sent


def neighbours(domains: Sequence[str], copies: int) -> list[list[int]]:
    """Return for each host the hosts that keep copies of its files.

    The hosts form a ring in which failure domains alternate, and each host sends to the next ones that are in other
    domains; only where there are too few of these, to hosts of its own domain.

    Args:
        domains: The failure domain of each host.
        copies: How many hosts keep the files of a host besides itself.
    """
    seen: dict[str, int] = {}
    turns = []
    for host, domain in enumerate(domains):
        turns.append((seen.setdefault(domain, 0), host))
        seen[domain] += 1
    ring = [host for _, host in sorted(turns)]
    found: list[list[int]] = [[] for _ in domains]
    for place, host in enumerate(ring):
        after = [*ring[place + 1 :], *ring[:place]]
        after.sort(key=lambda other: domains[other] == domains[host])  # stable: those in other domains come first
        found[host] = after[:copies]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStatus:
    """What a run has in the memory or on the disks of its hosts.

    Attributes:
        path: The folder on this host.
        step: The newest step that this run has saved there, or None.
        hosts: How many hosts the program has.
        copies_on: The hosts that keep copies of the files of this one.
        error: Why the last local save failed; None after one that succeeded.
    """

    path: str
    step: int | None
    hosts: int
    copies_on: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class HeldStep:
    """What one host has of a local step: its files by path, each with its folder and size, and the commit record."""

    files: Mapping[str, tuple[str, int]]
    record: CheckpointRecord | None = None

    def to_json(self) -> dict[str, Any]:
        record = None if self.record is None else self.record.to_document()
        return {"files": self.files, "record": record}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str) -> HeldStep:
        record = document["record"]
        return cls(
            {path: (str(where), int(size)) for path, (where, size) in document["files"].items()},
            None if record is None else CheckpointRecord.from_document(record, source=source),
        )


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A local step of which every file is on some host.

    Attributes:
        folder: The name of its folder on every host.
        record: Its commit record.
        holders: By path, the number of each host that has the file, and the folder there.
    """

    folder: str
    record: CheckpointRecord
    holders: Mapping[str, Sequence[tuple[int, str]]]

    @property
    def step(self) -> int:
        assert self.record.step is not None
        return self.record.step

    def hosts(self) -> set[int]:
        """Return the hosts that have any of it."""
        return {host for places in self.holders.values() for host, _ in places}


def files_of(record: CheckpointRecord) -> Iterator[tuple[str, FileRecord]]:
    """Generate the files of a checkpoint by their path in its folder."""
    for item in record.items.values():
        yield from item.paths.items()


def whole_steps(held: Sequence[Mapping[str, HeldStep]]) -> list[WholeStep]:
    """Return the steps of which every file is on some host in its full size, the newest first.

    Args:
        held: What each host has, by the name of the folder.
    """
    found = []
    for folder in sorted(set().union(*held)):
        here = [(host, steps[folder]) for host, steps in enumerate(held) if folder in steps]
        records = [one.record for _, one in here if one.record is not None and one.record.step is not None]
        if not records:
            continue
        holders = {
            path: [(host, one.files[path][0]) for host, one in here if one.files.get(path, ("", -1))[1] == known.size]
            for path, known in files_of(records[0])
        }
        if all(holders.values()) and all(record.identity == records[0].identity for record in records):
            holders[RECORD] = [(host, one.files[RECORD][0]) for host, one in here if one.record is not None]
            found.append(WholeStep(folder, records[0], holders))
    return sorted(found, key=lambda one: (one.step, one.folder), reverse=True)

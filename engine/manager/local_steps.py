"""Find a run's host-local steps, the hosts that store their files, and the newest complete step.

At the start, a run collects the file lists of all hosts. A step is complete if every file is on at least one host. Each
host verifies the checksums of its files in the newest complete step. :class:`~..storage.ScatteredFiles` reads files on
this host directly, and requests byte ranges of other files from a host that has them. `local_tier` saves local steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..arrays import FileCheck
from ..checkpoint import file_checks
from ..clock import format_size
from ..distributed import ProcessGroup, Rendezvous, machine_identity, primary_host
from ..errors import HoldfastError, OptionError, StorageError, itemized, shortened
from ..format import PARTIAL, RECORD, CheckpointRecord, FileRecord
from ..steps import read_record
from ..storage import CORES, TEMPORARY_PREFIX, DataReader, Location, ScatteredFiles, as_location, parallel_map
from .directory import RunDirectory
from .events import described
from .options import Local
from .ownership import OPTIONS, LocalBranch
from .peers import PATIENCE, Peer, PeerServer, RemoteReader, check_private, own_address

_logger = logging.getLogger("holdfast")

_TOKEN = re.compile(r"[0-9a-f]{1,64}")

OWN = "own"  # subfolder for files written by the host's own processes
COPIES = "copies"  # subfolder for copies of other hosts' files


def neighbours(domains: Sequence[str], copies: int) -> list[list[int]]:
    """Return, for each host, the indices of the ``copies`` other hosts that keep copies of its files."""
    # The ring alternates between failure domains. Each host sends copies to the next hosts that are in other domains,
    # and to hosts in its own domain only if the other domains have too few hosts.
    ring = sorted(range(len(domains)), key=lambda host: (domains[:host].count(domains[host]), host))
    keepers: list[list[int]] = [[] for _ in domains]
    for position, host in enumerate(ring):
        after = [*ring[position + 1 :], *ring[:position]]
        after.sort(key=lambda other: domains[other] == domains[host])  # stable sort: hosts in other domains come first
        keepers[host] = after[:copies]
    return keepers


@dataclass(frozen=True, slots=True)
class HeldStep:
    """The files of a local step on one host, as a mapping from path to (subfolder, size), and the commit record."""

    files: Mapping[str, tuple[str, int]]
    record: CheckpointRecord | None = None

    def to_json(self) -> dict[str, Any]:
        return {"files": self.files, "record": None if self.record is None else self.record.to_document()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str) -> HeldStep:
        record = document["record"]
        record = None if record is None else CheckpointRecord.from_document(record, source=source)
        return cls(document["files"], record)


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A local step that is complete, that is, each of its files is on at least one host."""

    folder: str  # name of the step's folder on every host
    record: CheckpointRecord
    holders: Mapping[str, Sequence[tuple[int, str]]]  # for each path, the hosts with the file, as (index, subfolder)

    @property
    def step(self) -> int:
        assert self.record.step is not None
        return self.record.step


def files_of(record: CheckpointRecord) -> Iterator[tuple[str, FileRecord]]:
    for item in record.items.values():
        yield from item.paths.items()


def gather(folder: str, held: Sequence[Mapping[str, HeldStep]]) -> WholeStep | str:
    """Combine a step's files on all hosts, or return why the step is incomplete ("" if its save did not finish)."""
    here = [(host, steps[folder]) for host, steps in enumerate(held) if folder in steps]
    records = [step.record for _, step in here if step.record is not None and step.record.step is not None]
    if not records:
        is_unfinished = any(PARTIAL in step.files for _, step in here) or not any(step.files for _, step in here)
        return "" if is_unfinished else f"its {RECORD} is missing or damaged on all hosts"
    if any(record.identity != records[0].identity for record in records):
        return f"the hosts have the {RECORD} of different saves"
    holders = {
        path: [(host, step.files[path][0]) for host, step in here if step.files.get(path, ("", -1))[1] == record.size]
        for path, record in files_of(records[0])
    }
    if missing := [path for path, hosts in holders.items() if not hosts]:
        return f"missing or damaged on all hosts: {shortened(missing, 3)}"
    holders[RECORD] = [(host, step.files[RECORD][0]) for host, step in here if step.record is not None]
    return WholeStep(folder, records[0], holders)


def whole_steps(held: Sequence[Mapping[str, HeldStep]]) -> list[WholeStep]:
    """Return the complete local steps, newest first."""
    gathered = (gather(folder, held) for folder in set().union(*held))
    whole = (step for step in gathered if isinstance(step, WholeStep))
    return sorted(whole, key=lambda step: (step.step, step.folder), reverse=True)


def is_on_line(folder: str, branches: Sequence[LocalBranch]) -> bool:
    """Return whether the local step in a folder belongs to the history described by ``branches``."""
    sequence, step, attempt = sequence_of(folder), step_of(folder), folder.rpartition(".")[2]
    indices = [n for n, branch in enumerate(branches) if branch.attempt == attempt and branch.sequence < sequence]
    return bool(indices) and all(step <= later.after for later in branches[indices[-1] + 1 :])


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    domain: str
    url: str
    leader: int  # the first process on the host, which serves and copies files for the host


@dataclass(frozen=True, slots=True)
class _Program:
    """The values that process 0 sends to all processes at the start."""

    hosts: Sequence[_Host]
    run: str | None  # name of the folder with the run's local steps; None while the run's directory is new
    path_digest: str  # digest of the run directory's path; also the suffix of ``run``
    token: str
    attempt: str  # random text that identifies this attempt of the program
    branches: tuple[LocalBranch, ...]  # the history at the start; it determines which local steps are valid


class LocalHosts:
    """The hosts of a program, and the local steps of the run on these hosts."""

    def __init__(self, options: Local, run: RunDirectory, processes: ProcessGroup) -> None:
        self.root = as_location(options.url, writes=True)
        self.peers: dict[int, Peer] = {}  # connections to the other hosts, by host index
        self.newest: WholeStep | None = None  # the newest local step if it is newer than the directory's
        self._run = run
        self._processes = processes
        self._patience = min(PATIENCE, processes.timeout / 4)
        self._server: PeerServer | None = None
        self.space: Location | None = None  # the run's folder on this host; None until the first save creates it
        self.further: set[int] = set()  # other complete local steps in the run's history, read only if needed
        self.left: set[int] = set()  # complete local steps that are not in the run's history
        self._agreed_steps: list[dict[str, HeldStep]] = []  # the steps of each host by folder; only on process 0
        self._elsewhere: dict[int, str] = {}  # unused steps, perhaps of another run, with reasons; only on process 0
        self.unused: dict[int, str] = {}  # maps each unused step to the reason, such as missing files
        self.program: _Program
        try:
            self._open(options)
        except BaseException:
            self.disconnect()
            raise

    def _open(self, local: Local) -> None:
        """Find the hosts and the newest complete local step."""
        name = local.host or f"{socket.gethostname()}/{machine_identity()}"
        me = {"name": name, "domain": local.failure_domain or name, "url": self.root.url}
        program = self._processes.agree("hosts of local steps", me, self._meet)
        hosts = [_Host(**fields) for fields in program["hosts"]]
        branches = tuple(LocalBranch(*fields) for fields in program["branches"])
        self.program = _Program(**{**program, "hosts": hosts, "branches": branches})
        self.host = next(number for number, host in enumerate(hosts) if host.name == name)
        self.leads = hosts[self.host].leader == self._processes.index  # True if this process serves files for its host
        self.copies = neighbours([host.domain for host in hosts], local.copies)[self.host]  # hosts to send copies to
        if len(hosts) == 1 and local.copies and self._processes.is_primary:
            _logger.warning(
                "%s: all processes are on one host, so that local steps have no copies: they survive the end of the "
                "program, and not the loss of the host. Give copies=0 to say that this is meant",
                self.root,
            )
        mine: dict[str, Any] = {"address": None, "held": {}, "elsewhere": [], "problem": None}
        try:
            self._check_places(self.program.run)
            if self.leads and len(hosts) > 1:
                address = local.address or own_address(primary_host())
                self._server = PeerServer(os.fspath(self.root), self.program.token, address, timeout=self._patience)
                mine["address"] = self._server.address
            if self.leads:
                held = self._held()
                mine["held"] = {folder: step.to_json() for folder, step in held.items()}
                mine["elsewhere"] = list(self._steps_elsewhere(held).items())
        except HoldfastError as error:  # sent to process 0, so that all processes raise it
            mine["problem"] = f"{name}: {error}"
        answer = self._processes.agree("local steps", mine, self._first_choice)
        self.sequence = answer["sequence"]  # the highest sequence number of a local step on any host
        for number, (host, address) in enumerate(zip(hosts, answer["addresses"], strict=True)):
            if address is not None and number != self.host:
                token, patience = self.program.token, self._patience
                self.peers[number] = Peer(f"host {host.name}", tuple(address), token, timeout=patience)
        self.further, self.left = set(answer["steps"]), set(answer["left"])
        self.newest = self._find(answer, None)
        newest = max([*self._run.steps(), -1 if self.newest is None else self.newest.step])
        newer = [f"step {step}: {why}" for step, why in sorted(self.unused.items()) if step > newest]
        if newer and self._processes.is_primary:
            _logger.warning("%s", itemized(f"{self.root}: newer local steps of this run are not used:", newer))

    def _meet(self, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Determine the hosts of the program and the history of the run; called on process 0."""
        hosts: dict[str, dict[str, Any]] = {}
        for index, process in enumerate(processes):
            host = hosts.setdefault(process["name"], {**process, "leader": index})
            if host["url"] != process["url"]:
                raise OptionError(
                    f"processes {host['leader']} and {index} are on one host, {host['name']}, and have different local "
                    f"folders: {host['url']} and {process['url']}; give them the same, or an identity each (host=)"
                )
        return {
            "hosts": list(hosts.values()),
            "run": self._folder_name(),
            "path_digest": self._path_digest(),
            "token": os.urandom(32).hex(),
            "attempt": os.urandom(4).hex(),
            "branches": self._run.branches,
        }

    def _folder_name(self) -> str | None:
        run = self._run.identity.run
        return f"{run}.{self._path_digest()}" if run and _TOKEN.fullmatch(run) else None

    def _path_digest(self) -> str:
        # A copied directory, or a series with another step_prefix, counts as another run despite the same identity.
        first = self._run.step_location(0).url
        return hashlib.blake2b(first.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()

    # ---- choosing a complete step

    def _check_places(self, name: str | None) -> None:
        """Raise an error if another user of the host could have added or replaced local steps in the folders."""
        check_private(os.fspath(self.root), shared=True)
        if name is not None:
            check_private(os.fspath(self.root / name), shared=False)

    def _held(self) -> dict[str, HeldStep]:
        held: dict[str, HeldStep] = {}
        if self.program.run is None:
            return held
        for where in (COPIES, OWN):
            folder = self.root / self.program.run / where
            try:
                folder.check_not_link()
                entries = folder.entries()
            except StorageError as error:
                _logger.warning("local steps are not used: %s", error)
                continue
            for entry in entries:
                step_folder = folder / entry.name
                before = held.get(step_folder.name, HeldStep({}))
                files, record = {entry.name: (where, 0)}, before.record  # if the entry is not a readable step folder
                try:
                    if entry.is_directory and not step_folder.is_link():
                        files = {path: (where, size) for path, size in files_in(step_folder)}
                    if RECORD in files:
                        record = read_record(step_folder)
                except HoldfastError as error:  # another host may have a copy of the record
                    _logger.warning("a local step or its commit record is passed over on this host: %s", error)
                held[step_folder.name] = HeldStep({**before.files, **files}, record)
        return held

    def _steps_elsewhere(self, held: Mapping[str, HeldStep]) -> dict[int, str]:
        """Return the unused local steps that match only the run's identity or only its path, each with the reason."""
        unused = {}
        for entry in self.root.entries():
            run, _, path = entry.name.partition(".")
            if entry.name == self.program.run:
                continue
            if path == self.program.path_digest:
                why = (
                    f"{self._run.location / OPTIONS} does not name its run: the file was damaged or removed, or it is "
                    "a step of another run, which was saved in this directory before"
                )
            elif not held and run == str(self.program.run).partition(".")[0]:
                why = (
                    "it is of the same run in a directory at another path, or with another step_prefix. If this "
                    "directory was moved, start the run with the earlier path, such as by a link; if it is a copy, "
                    "this is meant"
                )
            else:
                continue
            for where in (COPIES, OWN):
                parent = self.root / entry.name / where
                for folder in [parent / child.name for child in parent.entries() if child.is_directory]:
                    if not folder.is_link() and (folder / RECORD).is_there():
                        unused[step_of(folder.name)] = f"{folder} is left: {why}"
        return unused

    def _first_choice(self, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the address of each host and the newest complete step; called on process 0."""
        leaders = [processes[host.leader] for host in self.program.hosts]
        if problems := [leader["problem"] for leader in leaders if leader["problem"]]:
            raise OptionError(f"local steps: {problems[0]}")
        self._agreed_steps = [
            {folder: HeldStep.from_json(document, folder) for folder, document in leader["held"].items()}
            for leader in leaders
        ]
        self._elsewhere = {step: why for leader in leaders for step, why in leader["elsewhere"]}
        numbers = [sequence_of(folder) for steps in self._agreed_steps for folder in steps]
        counting = [whole.step for whole in self._counting()]
        return {
            "addresses": [leader["address"] for leader in leaders],
            "sequence": max(numbers, default=0),
            **self._choose(None),
            "steps": counting,
            "left": [whole.step for whole in whole_steps(self._agreed_steps) if whole.step not in counting],
        }

    def _counts(self, folder: str) -> bool:
        """Return whether a local step belongs to the run's history; called on process 0."""
        if self.program.branches:
            return is_on_line(folder, self.program.branches)
        return step_of(folder) > max(self._run.steps(), default=-1)  # a new directory has no recorded history

    def _counting(self) -> list[WholeStep]:
        return [whole for whole in whole_steps(self._agreed_steps) if self._counts(whole.folder)]

    def _choose(self, step: int | None) -> dict[str, Any]:
        """Choose ``step``, or the newest local step if it is newer than the directory's; also report unused steps."""
        counting, unused = self._counting(), self._elsewhere.copy()
        for folder in set().union(*self._agreed_steps):
            why = gather(folder, self._agreed_steps)
            if isinstance(why, str) and why and self._counts(folder):
                unused[step_of(folder)] = why
        for counted in counting:
            unused.pop(counted.step, None)
        newest = max(self._run.steps(), default=-1)  # a local step with the same number may be outdated
        whole = next((w for w in counting if (w.step > newest if step is None else w.step == step)), None)
        document = whole and {"folder": whole.folder, "record": whole.record.to_document(), "holders": whole.holders}
        return {"whole": document, "unused": list(unused.items())}

    def _again(self, step: int | None, folder: str, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Choose again, ignoring the files in ``folder`` that hosts have found to be damaged; called on process 0."""
        for steps, host in zip(self._agreed_steps, self.program.hosts, strict=True):
            if folder in steps:
                held, damaged = steps[folder], processes[host.leader]
                kept = {path: where for path, where in held.files.items() if path not in damaged}
                steps[folder] = replace(held, files=kept)
        return {"damaged": any(processes), **self._choose(step)}

    def take(self, step: int) -> WholeStep | None:
        """Return one of the ``further`` steps if it is intact; all processes must call this method."""
        self.further.discard(step)
        return self._find(self._processes.agree("local step", None, lambda _: self._choose(step)), step)

    def _find(self, answer: Mapping[str, Any], number: int | None) -> WholeStep | None:
        """Return the chosen step after all hosts have verified their files; if the step is damaged, choose another."""
        while (whole := answer["whole"]) is not None:
            record = CheckpointRecord.from_document(whole["record"], source=whole["folder"])
            step = WholeStep(whole["folder"], record, whole["holders"])
            for digested in (True, False):  # the index first, because it contains the checksums of the other files
                mine = self._damaged(step, digested) if self.leads else []
                answer = self._processes.agree("verified local steps", mine, partial(self._again, number, step.folder))
                if answer["damaged"]:
                    break
            else:
                break
        self.unused.update(answer["unused"])
        if whole is None:
            return None
        self.further.discard(step.step)
        return step

    def forget(self) -> None:
        self.unused, self.further, self.left = {}, set(), set()  # replaced, because other threads may be iterating

    def _damaged(self, step: WholeStep, digested: bool) -> list[str]:
        """Return this host's damaged files; check those with checksums in the record (``digested``) or in the index."""
        try:
            checks = (
                {path: FileCheck(record) for path, record in files_of(step.record) if record.crc32c is not None}
                if digested
                else file_checks(self._location_of(step), step.record)
            )
        except HoldfastError as error:  # report all files as damaged, so that another step is chosen
            _logger.warning("the local step %d cannot be verified: %s", step.step, error)
            return [path for path, _ in files_of(step.record)]
        here = [
            (path, where)
            for path, check in checks.items()
            for host, where in step.holders[path]
            if host == self.host and (check.record.crc32c is not None) == digested
        ]

        def is_met(held: tuple[str, str]) -> bool:
            path, where = held
            try:
                return checks[path].is_met(self.step_folder(step.folder, where) / path)
            except StorageError as error:
                _logger.warning("a file of the local step %d cannot be read: %s", step.step, error)
                return False

        met = parallel_map(is_met, here, CORES)
        damaged = [path for (path, _), good in zip(here, met, strict=True) if not good]
        if damaged:
            text = "%s: %d files of the local step %d are damaged on this host, such as %s"
            _logger.warning(text, self.root, len(damaged), step.step, damaged[0])
        return damaged

    def opened(self, step: WholeStep) -> tuple[Location, CheckpointRecord]:
        """Return the location and commit record from which to read a step."""
        having = {host for places in step.holders.values() for host, _ in places}
        missing = [host.name for number, host in enumerate(self.program.hosts) if number not in having]
        if self._processes.is_primary:
            size = format_size(step.record.nbytes)
            lost = f", and on {', '.join(missing)} there is nothing of it" if missing else ""
            text = "%s: step %d (%s) is whole in the local places of the hosts%s"
            _logger.info(text, self._run.location, step.step, size, lost)
        return self._location_of(step), step.record

    # ---- reading

    def step_folder(self, folder: str, where: str = OWN) -> Location:
        assert self.program.run is not None
        return self.root / self.program.run / where / folder

    def _location_of(self, step: WholeStep) -> Location:
        """Return a location that presents a step's files as one folder, regardless of the hosts that have them."""
        sizes = {path: record.size for path, record in files_of(step.record)}

        def opened(path: str) -> DataReader:
            held = step.holders[path]
            here = next((where for host, where in held if host == self.host), None)
            if here is not None:
                return (self.step_folder(step.folder, here) / path).open_data()
            remote = [(self.peers[host], f"{self.program.run}/{where}/{step.folder}/{path}") for host, where in held]
            return RemoteReader(path, sizes[path], remote)

        return Location(ScatteredFiles(f"the local step {step.step}", sizes, opened), "")

    def make_folder(self, rendezvous: Rendezvous | None) -> None:
        """Create the run's folder on all hosts; raise StorageError on all processes if this fails on any host."""
        # Use the local save's rendezvous, because it does not wait for processes that have left after a failure.
        timeout = self._processes.timeout
        name = self._folder_name() if self._processes.is_primary else None
        if rendezvous is not None:
            mine = json.dumps(name).encode() if self._processes.is_primary else None
            name = json.loads(rendezvous.broadcast("run", mine, timeout))
        problem = space = None
        if name is None:  # the file that stores the run's identity is damaged
            problem = f"{self._run.location}: the identity of the run is not known"
        else:
            self.program = replace(self.program, run=name)
            space = self.root / name
            try:
                with contextlib.suppress(OSError):  # make_directory() below raises an error with the reason
                    os.makedirs(self.root, 0o755, exist_ok=True)
                    os.mkdir(space, 0o700)
                space.make_directory()
                self._check_places(name)
                os.chmod(space, 0o700)  # private, because the parent folder is often writable by all users
            except (HoldfastError, OSError) as error:
                problem = described(error)
        mine = b"" if problem is None else f"process {self._processes.index}: {problem}".encode()
        if rendezvous is not None:
            mine = rendezvous.summarize("folders", mine, timeout, lambda texts: next(filter(None, texts), b""))
        if mine:
            raise StorageError(mine.decode())
        self.space = space

    def send(self, number: int, path: str, size: int, pieces: Callable[[], Iterable[memoryview]]) -> None:
        """Send a file to another host; ``path`` is relative to the run's folder."""
        self.peers[number].write(f"{self.program.run}/{path}", size, pieces)

    def disconnect(self) -> None:
        for peer in self.peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()


def files_in(folder: Location, begin: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path and size of each file below a folder, except links and temporary files."""
    for entry in folder.entries():
        path = f"{begin}{entry.name}"
        if (folder / entry.name).is_link() or entry.name.startswith(TEMPORARY_PREFIX):
            continue
        if entry.is_directory:
            yield from files_in(folder / entry.name, f"{path}/")
        elif entry.size is not None:
            yield path, entry.size


def sequence_of(folder: str) -> int:
    number = folder.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 19 else 0


def step_of(folder: str) -> int:
    return sequence_of(folder.partition(".")[2])

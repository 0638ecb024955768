"""Local steps: saves into the memory or on the disk of each host, with copies on other hosts, and how a run finds them.

A local step is a checkpoint whose files are divided among the hosts. In the folder of a run, ``<url>/<run>``, a host
has ``own/<folder>``, what its processes have written, and ``copies/<folder>``, what the hosts whose copies it keeps
have sent. Process 0 merges the index as in any save, so that its host and the hosts with its copies have the index and
the commit record. The record is written when all files and copies are in place, and then older steps are removed.

A new run asks all hosts what they have. The newest step of which every file is somewhere is verified by its checksums,
each file where it lies, and read through :class:`~..storage.ScatteredFiles`: files of this host directly, others by
ranges from a host that has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import FileCheck
from ..checkpoint import BackgroundSave, ItemToSave, Save, file_checks, leave_save
from ..clock import Clock, format_size, seconds
from ..distributed import ProcessGroup, Rendezvous, machine_identity, primary_host
from ..errors import (
    BarrierTimeoutError,
    DamagedCheckpointError,
    HoldfastError,
    ObjectNotFoundError,
    OptionError,
    PeerFailedError,
    StorageError,
)
from ..format import PARTIAL, RECORD, CheckpointRecord
from ..steps import RECORD_LIMIT
from ..storage import (
    CORES,
    TEMPORARY_PREFIX,
    Buffer,
    DataReader,
    Location,
    ScatteredFiles,
    aligned_empty,
    as_location,
    parallel_map,
)
from .decisions import EverySteps
from .directory import RunDirectory
from .events import RunEvents, described
from .local_steps import COPIES, OWN, HeldStep, LocalStatus, WholeStep, files_of, neighbours, whole_steps
from .options import CheckpointManagerOptions, Local
from .peers import Peer, PeerServer, check_private, own_address

_logger = logging.getLogger("holdfast")

_KEPT = 2  # local steps
_TOKEN = re.compile(r"[0-9a-f]{1,64}")
_SENDERS = 4  # files that a host sends at a time
_PIECE = 1 << 20
_PATIENCE = 30.0  # seconds in which another host must send or take the next bytes
_SILENCE = 60.0  # seconds between two events that tell of local saves


@dataclass(frozen=True, slots=True)
class _Host:
    """One host of the program."""

    name: str
    domain: str
    url: str
    leader: int  # the process that serves and copies for the host: its first


@dataclass(frozen=True, slots=True)
class _Program:
    """What process 0 tells all processes at the beginning."""

    hosts: Sequence[_Host]
    run: str | None  # the token of the run whose local steps count, and the epoch; None without any yet
    token: str
    attempt: str  # text that no other start of the program has


@dataclass(slots=True)
class _Kept:
    """The local steps of this run that count, by their folder."""

    steps: dict[str, int] = field(default_factory=dict)

    def add(self, folder: str, step: int) -> None:
        """Add a step; of those before it, the last stays, and later ones belong to a branch that was left."""
        before = [one for one in self.steps.items() if one[1] <= step and one[0] != folder]
        self.steps = dict([*before[-(_KEPT - 1) :], (folder, step)])


class LocalTier:
    """The local steps of one run, as one of its processes sees them; all processes call the same methods."""

    def __init__(
        self,
        options: CheckpointManagerOptions,
        run: RunDirectory,
        processes: ProcessGroup,
        clock: Clock,
        events: RunEvents,
    ) -> None:
        assert options.local is not None
        self._options: Local = options.local
        self._root = as_location(self._options.url, writes=True)
        self._run = run
        self._processes = processes
        self._clock = clock
        self._events = events
        self._trigger = EverySteps(self._options.every)
        self._patience = min(_PATIENCE, processes.timeout / 4)
        self._previous: int | None = None
        self._branches = True  # whether the next step of the directory may begin another branch
        self._restored: int | None = None  # the step of a restore since the first step
        self._background = BackgroundSave(seconds(options.save_timeout_secs))
        # The error of a local save that has missed a process, or the store: the next one would, too.
        self._lost: BarrierTimeoutError | PeerFailedError | None = None
        self._error: str | None = None
        self._warned: set[str] = set()
        self._saves = 0  # since the last event that tells of them
        self._told: float | None = None  # the monotonic clock at that event
        self._kept = _Kept()
        self._sequence = 0
        self._server: PeerServer | None = None
        self._peers: dict[int, Peer] = {}
        self._program: _Program
        self._space: Location | None = None  # the folder of the run; None until this run has its directory
        self.bytes_from_peers = 0
        try:
            self._open()
        except BaseException:
            self._disconnect()
            raise

    # ---- the hosts

    def _open(self) -> None:
        """Find the hosts, and the newest step that is whole across them."""
        local = self._options
        name = local.host or f"{socket.gethostname()}/{machine_identity()}"
        me = {"name": name, "domain": local.failure_domain or name, "url": self._root.url}
        found = self._agree("hosts of local steps", me, self._meet)
        self._program = _Program(
            [_Host(**one) for one in found["hosts"]], found["run"], found["token"], found["attempt"]
        )
        hosts = self._program.hosts
        self._host = next(number for number, host in enumerate(hosts) if host.name == name)
        self._leads = hosts[self._host].leader == self._processes.index
        self._copies = neighbours([host.domain for host in hosts], local.copies)[self._host]
        if len(hosts) == 1 and local.copies and self._processes.is_primary:
            _logger.warning(
                "%s: all processes are on one host, so that local steps have no copies: they survive the end of the "
                "program, and not the loss of the host. Give copies=0 to say that this is meant",
                self._root,
            )
        held: dict[str, HeldStep] = {}
        problem = None
        try:
            self._check_places(self._program.run)
            if self._leads and len(hosts) > 1:
                address = local.address or own_address(primary_host())
                self._server = PeerServer(os.fspath(self._root), self._program.token, address, timeout=self._patience)
            if self._leads:
                held = self._held()
        except HoldfastError as error:  # all processes raise it
            problem = f"{name}: {error}"
        mine = {
            "address": None if self._server is None else self._server.address,
            "held": {folder: one.to_json() for folder, one in held.items()},
            "problem": problem,
        }
        self._agreed_steps: list[dict[str, HeldStep]] = []
        answer = self._agree("local steps", mine, self._first_choice)
        self._sequence = answer["sequence"]
        for number, address in enumerate(answer["addresses"]):
            if address is not None and number != self._host:
                host, port = address
                self._peers[number] = Peer(
                    f"host {hosts[number].name}", (host, port), self._program.token, timeout=self._patience
                )
        self._run.left_on_hosts = frozenset(answer["steps"])
        self._find(answer["whole"])

    def _meet(self, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the hosts of the program, and the run whose local steps count; on process 0."""
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
            "run": self._run_name(),
            "token": os.urandom(32).hex(),
            "attempt": os.urandom(4).hex(),
        }

    def _run_name(self) -> str | None:
        """Return the name of the folder of the run; None while the directory of the run is new."""
        identity = self._run.identity
        # A copy of a directory has the identity of the original, but another place, and is a run of its own.
        place = hashlib.blake2b(self._run.location.url.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
        tokens = [one for one in (identity.run, place, identity.epoch) if one is not None]
        return ".".join(tokens) if identity.run and all(map(_TOKEN.fullmatch, tokens)) else None

    def _agree(self, what: str, mine: Any, work: Callable[[Sequence[Any]], Any]) -> Any:
        """Return on all processes what process 0 makes of the values of all; its error is raised on all."""

        def summary(values: Sequence[bytes]) -> bytes:
            try:
                return json.dumps({"answer": work([json.loads(one) for one in values])}).encode()
            except OptionError as error:
                return json.dumps({"error": str(error)}).encode()
            except BaseException as error:
                if rendezvous is not None:
                    rendezvous.fail(error)
                raise

        rendezvous = self._processes.rendezvous(what)
        encoded = json.dumps(mine).encode()
        if rendezvous is None:
            found = summary([encoded])
        else:
            try:
                found = rendezvous.summarize("values", encoded, self._processes.timeout, summary)
            finally:
                rendezvous.close()
        answer = json.loads(found)
        if "error" in answer:
            raise OptionError(answer["error"])
        return answer["answer"]

    # ---- which step is whole

    def _check_places(self, name: str | None) -> None:
        """Refuse folders in which another user of the host could have put, or could exchange, local steps."""
        check_private(os.fspath(self._root), shared=True)
        if name is not None:
            check_private(os.fspath(self._root / name), shared=False)

    def _held(self) -> dict[str, HeldStep]:
        """Return what this host has of the steps of the run, by folder."""
        if self._program.run is None:
            return {}
        found: dict[str, HeldStep] = {}
        for where in (COPIES, OWN):
            for place in _folders(self._root / self._program.run / where):
                before = found.get(place.name, HeldStep({}))
                files = {path: (where, size) for path, size in _walk(place)}
                record = (_record_of(place) if RECORD in files else None) or before.record
                found[place.name] = HeldStep({**before.files, **files}, record)
        return found

    def _first_choice(self, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the address of each host and the newest whole step; on process 0."""
        leaders = [processes[host.leader] for host in self._program.hosts]
        if problems := [leader["problem"] for leader in leaders if leader["problem"]]:
            raise OptionError(f"local steps: {problems[0]}")
        self._agreed_steps = [
            {folder: HeldStep.from_json(one, folder) for folder, one in leader["held"].items()} for leader in leaders
        ]
        numbers = [_sequence(folder) for steps in self._agreed_steps for folder in steps]
        return {
            "addresses": [leader["address"] for leader in leaders],
            "sequence": max(numbers, default=0),
            "whole": self._choose(),
            "steps": [whole.step for whole in whole_steps(self._agreed_steps)],
        }

    def _choose(self) -> dict[str, Any] | None:
        whole = whole_steps(self._agreed_steps)
        if not whole:
            return None
        newest = whole[0]
        return {"folder": newest.folder, "record": newest.record.to_document(), "holders": newest.holders}

    def _again(self, folder: str, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the newest whole step without what the hosts have found damaged; on process 0."""
        any_damage = False
        for steps, host in zip(self._agreed_steps, self._program.hosts, strict=True):
            damaged = set(processes[host.leader]["damaged"])
            any_damage |= bool(damaged)
            if folder in steps:
                held = steps[folder]
                kept = {path: where for path, where in held.files.items() if path not in damaged}
                steps[folder] = replace(held, files=kept)
        return {"damaged": any_damage, "whole": self._choose() if any_damage else None}

    def _find(self, whole: Mapping[str, Any] | None) -> None:
        """Verify the newest whole step, each file where it lies; go back to an older one if it is damaged."""
        newest = self._processes.decide("newest step of the directory", self._newest_in_directory)
        while whole is not None:
            record = CheckpointRecord.from_document(whole["record"], source=whole["folder"])
            holders = {path: [(host, where) for host, where in one] for path, one in whole["holders"].items()}
            step = WholeStep(whole["folder"], record, holders)
            if (
                newest is not None and step.step <= newest
            ):  # of equal ones, that of the directory may have been replaced
                return
            verified = True
            for digested in (True, False):  # the index first, which has the checksums of the others
                mine = self._damaged(step, digested) if self._leads else []
                answer = self._agree("verified local steps", {"damaged": mine}, partial(self._again, step.folder))
                if answer["damaged"]:
                    whole, verified = answer["whole"], False
                    break
            if verified:
                self._take(step)
                return

    def _newest_in_directory(self) -> int | None:
        return max(self._run.steps(), default=None)

    def _damaged(self, step: WholeStep, digested: bool) -> list[str]:
        """Return the files of a step that are damaged here: of those with a digest in the record, or of the others."""
        try:
            checks = (
                {path: FileCheck(known) for path, known in files_of(step.record) if known.crc32c is not None}
                if digested
                else file_checks(self._location_of(step), step.record)
            )
        except HoldfastError as error:  # then it is read from the directory, or an older one is
            _logger.warning("the local step %d cannot be verified: %s", step.step, error)
            return [path for path, _ in files_of(step.record)]
        here = [
            (path, where)
            for path, check in checks.items()
            for host, where in step.holders[path]
            if host == self._host and (check.known.crc32c is not None) == digested
        ]
        met = parallel_map(lambda one: checks[one[0]].is_met(self._place(step.folder, one[1]) / one[0]), here, CORES)
        damaged = [path for (path, _), good in zip(here, met, strict=True) if not good]
        if damaged:
            _logger.warning(
                "%s: %d files of the local step %d are damaged on this host, such as %s",
                self._root,
                len(damaged),
                step.step,
                damaged[0],
            )
        return damaged

    def _take(self, step: WholeStep) -> None:
        """Let the run read a step from the hosts."""
        self._kept.add(step.folder, step.step)
        self._run.local[step.step] = self._location_of(step), step.record
        missing = [host.name for number, host in enumerate(self._program.hosts) if number not in step.hosts()]
        if self._processes.is_primary:
            _logger.info(
                "%s: step %d (%s) is whole in the local places of the hosts%s",
                self._run.location,
                step.step,
                format_size(step.record.nbytes),
                f", and on {', '.join(missing)} there is nothing of it" if missing else "",
            )

    # ---- reading

    def _place(self, folder: str, where: str) -> Location:
        assert self._program.run is not None
        return self._root / self._program.run / where / folder

    def _location_of(self, step: WholeStep) -> Location:
        """Return the folder of a step as one place, wherever its files are."""
        sizes = {path: known.size for path, known in files_of(step.record)}

        def opened(path: str) -> DataReader:
            held = step.holders[path]
            own = next((where for host, where in held if host == self._host), None)
            if own is not None:
                return (self._place(step.folder, own) / path).open_data()
            remote = [(self._peers[host], f"{self._program.run}/{where}/{step.folder}/{path}") for host, where in held]
            return _RemoteReader(path, sizes[path], remote, self._count)

        return Location(ScatteredFiles(f"the local step {step.step}", sizes, opened), "")

    def _count(self, length: int) -> None:
        self.bytes_from_peers += length

    # ---- saving

    def due(self, step: int) -> bool:
        """Return whether a local save is due at a step."""
        if self._previous is None:
            self._previous = step - 1
        elif self._restored is not None and step <= self._previous:  # the run has gone back
            self._previous = self._restored
        self._restored = None
        return self._trigger.due(step, self._previous)

    def restored(self, step: int) -> None:
        """Note that the run resumes from a step."""
        if self._previous is None:
            self._previous = step
        else:  # perhaps one process only looks at an older step: the next step of the run shows it
            self._restored = step
        self._branches = True

    def directory_saves(self, step: int) -> None:
        """Let local steps not count that a save in the directory replaces, or whose branch it leaves; before it."""
        self._run.local.pop(step, None)
        if not self._branches:
            return
        self._background.join()
        self._branches = False
        for later in [one for one in self._run.local if one > step]:
            del self._run.local[later]
        self._kept.steps = {folder: one for folder, one in self._kept.steps.items() if one <= step}
        if not self._leads or self._program.run is None:
            return
        for where in (COPIES, OWN):
            try:
                folders = _folders(self._root / self._program.run / where)
            except StorageError as error:  # the save in the directory does not depend on it
                _logger.warning("%s: local steps of a branch that was left are not removed: %s", self._root, error)
                continue
            for folder in folders:
                record = _record_of(folder)
                if record is not None and record.step is not None and record.step > step:
                    _remove(folder)

    def forget(self) -> None:
        """Start anew: steps of the run were deleted explicitly, and the local ones are not to bring them back."""
        self._background.join()
        self._space = None
        self._kept = _Kept()
        self._run.local.clear()
        self._run.left_on_hosts = frozenset()

    def begin(self, step: int) -> Rendezvous | None:
        """Count a save that is due, before anything can fail, so that all processes count alike."""
        self._previous = step
        self._sequence += 1
        return self._processes.rendezvous("local save")

    def ready(self, step: int, rendezvous: Rendezvous | None) -> bool:
        """Wait for the local save before; return whether all processes have the folder of the run."""
        self._background.join()
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost  # this save would wait as long again
        if self._space is not None:
            return True
        try:
            self._space = self._make_space(rendezvous)
        except (StorageError, PeerFailedError) as error:
            if isinstance(error.__cause__, ConnectionError):  # the store of the processes is gone
                raise
            self._failed(step, error)
            leave_save(rendezvous, error)
        return self._space is not None

    def _make_space(self, rendezvous: Rendezvous | None) -> Location | None:
        """Make the folder of the run on all hosts; raise StorageError on all processes if one cannot."""
        # A process that has failed before takes no part in this, so it belongs to the local save, which that one knows.
        name = self._run_name() if self._processes.is_primary else None
        if rendezvous is not None:
            mine = json.dumps(name).encode() if self._processes.is_primary else None
            name = json.loads(rendezvous.broadcast("run", mine, self._processes.timeout))
        problem = space = None
        if name is None:  # the file that identifies the run is damaged
            problem = f"{self._run.location}: the identity of the run is not known"
        else:
            self._program = replace(self._program, run=name)
            space = self._root / name
            try:
                with contextlib.suppress(OSError):  # what follows then tells why
                    os.makedirs(self._root, 0o755, exist_ok=True)
                    os.mkdir(space, 0o700)
                space.make_directory()
                self._check_places(name)
                os.chmod(space, 0o700)  # the folder around it is often one that all users write to
            except (HoldfastError, OSError) as error:
                problem = described(error)
        mine = b"" if problem is None else f"process {self._processes.index}: {problem}".encode()
        found = mine if rendezvous is None else rendezvous.summarize("folders", mine, self._processes.timeout, _first)
        if found:
            raise StorageError(found.decode())
        return space

    def save(
        self,
        step: int,
        values: Mapping[str, ItemToSave],
        metrics: Mapping[str, Any] | None,
        facts: Mapping[str, Any] | None,
        rendezvous: Rendezvous | None,
    ) -> None:
        """Save a step; writing and copying happen in the background, if the items allow that."""
        began = time.perf_counter()
        assert self._space is not None
        self._run.local.clear()  # from now on, older ones are removed
        self._run.left_on_hosts = frozenset()
        folder = f"{self._sequence:08d}.{step}.{self._program.attempt}"
        if self._leads:
            try:
                self._remove_uncounted(folder)  # before the save, as they may be what fills the host
            except StorageError as error:
                _logger.debug("%s: local steps that do not count are not removed: %s", self._space, error)
        save = Save(
            self._space / OWN / folder,
            {name: replace(item, reuse=None) for name, item in values.items()},
            overwrite=True,
            owned=True,
            began=began,
            rendezvous=rendezvous,
            timeout=self._processes.timeout,
            shared=False,
        )

        def complete(awaited: Any = None) -> None:
            self._complete(save, folder, step, metrics, facts, rendezvous, awaited)

        try:
            if save.in_background:
                self._background.start(complete, what=f"the local step {step}", step=step)
            else:
                complete()
        except BaseException as error:  # an interrupt, or the system has no more threads
            save.give_up(error)
            raise

    def _complete(
        self,
        save: Save,
        folder: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        facts: Mapping[str, Any] | None,
        rendezvous: Rendezvous | None,
        awaited: Any,
    ) -> None:
        assert self._space is not None
        timeout = self._processes.timeout
        try:
            with save.completing() as claimed:
                if not claimed:
                    return
                items = save.write(awaited)
                if rendezvous is not None:
                    # Then all processes of each host have written. Process 0 may wait as long for one of them.
                    rendezvous.broadcast("merged", b"", 2 * timeout)
                sent = self._send_copies(folder) if self._leads else 0
                if rendezvous is not None:
                    rendezvous.gather("copied", b"", timeout)
                record = None
                if items is not None:
                    record = CheckpointRecord(
                        items=items,
                        time=self._clock.now(),
                        step=step,
                        reason=f"every {self._options.every} steps",
                        metrics=metrics,
                        custom_metadata=facts,
                    )
                    content = record.encode()
                    self._check_owner()
                    for number in self._copies:
                        self._send(number, f"{COPIES}/{folder}/{RECORD}", content)
                _, report = save.commit(record)
            self._kept.add(folder, step)
            if self._leads:
                self._prune(folder)
        except Exception as error:  # training continues, and its steps are in the directory
            self._failed(step, error)
            return
        self._error = None
        self._warned.clear()
        _logger.debug("local %s", report)
        self._saves += 1
        now = self._clock.monotonic()
        if self._told is None or now - self._told >= _SILENCE:
            self._events.write(
                "saved_locally",
                step=step,
                saves=self._saves,
                bytes=report.bytes,
                copied_bytes=sent,
                blocked_seconds=round(report.blocked_seconds, 6),
                total_seconds=round(report.total_seconds, 6),
            )
            self._told, self._saves = now, 0

    def _check_owner(self) -> None:
        """Raise OwnershipError if another run has taken over, on process 0; its local steps are in the same folder."""
        try:
            self._run.ownership.check()
        except StorageError as error:  # local steps are for this, too
            _logger.debug("%s: whether this run still owns it is not known: %s", self._run.location, error)

    def _failed(self, step: int, error: Exception) -> None:
        kind, self._error = type(error).__name__, described(error)
        if isinstance(error, BarrierTimeoutError) or (
            isinstance(error, PeerFailedError) and isinstance(error.__cause__, ConnectionError)
        ):
            self._lost = error
        self._events.write("local_failed", step=step, error=self._error)
        _logger.log(
            logging.DEBUG if kind in self._warned else logging.WARNING,
            "%s: the local save of step %d failed; training continues, and its steps are in %s: %s",
            self._root,
            step,
            self._run.location,
            error,
        )
        self._warned.add(kind)

    def _send_copies(self, folder: str) -> int:
        """Send what this host has written to the hosts that keep copies; return the bytes."""
        assert self._space is not None
        place = self._space / OWN / folder
        files = list(_walk(place))
        work = [(number, path, size) for number in self._copies for path, size in files]

        def send(one: tuple[int, str, int]) -> None:
            number, path, size = one
            self._send_file(number, f"{COPIES}/{folder}/{path}", place / path, size)

        parallel_map(send, work, _SENDERS, name="holdfast-copies")
        return sum(size for _, _, size in work)

    def _send(self, number: int, path: str, content: bytes) -> None:
        self._peers[number].write(f"{self._program.run}/{path}", len(content), lambda: [memoryview(content)])

    def _send_file(self, number: int, path: str, source: Location, size: int) -> None:
        def pieces() -> Iterator[memoryview]:
            buffer = Buffer()
            with source.open_data(cached=True) as file:
                for start in range(0, size, _PIECE):
                    yield file.read(start, min(_PIECE, size - start), buffer).data

        self._peers[number].write(f"{self._program.run}/{path}", size, pieces)

    def _prune(self, newest: str) -> None:
        """Remove the local steps of this run that do not count any more, on this host."""
        assert self._space is not None
        run = self._space.name.split(".")[:2]  # without the epoch
        for entry in self._root.entries():
            if entry.name != self._space.name and entry.name.split(".")[:2] == run:
                _remove(self._root / entry.name)
        self._remove_uncounted(newest)

    def _remove_uncounted(self, newest: str) -> None:
        """Remove the local steps on this host that do not count any more.

        Those are of failed saves and of earlier starts, which have ended: this run owns the directory now.
        """
        assert self._space is not None
        for where in (OWN, COPIES):
            for entry in (self._space / where).entries():
                if entry.name not in self._kept.steps and _sequence(entry.name) < _sequence(newest):
                    _remove(self._space / where / entry.name)

    # ---- the end

    def status(self) -> LocalStatus:
        """Return what this run has in the local places."""
        hosts = self._program.hosts
        return LocalStatus(
            path=self._root.url,
            step=max(self._kept.steps.values(), default=None),
            hosts=len(hosts),
            copies_on=tuple(hosts[number].name for number in self._copies),
            error=self._error,
        )

    def wait(self) -> None:
        """Wait for the local save that is under way."""
        self._background.join()

    def close(self, *, finished: bool) -> None:
        """Stop serving; remove the local steps if the run has ended and its directory has all of them."""
        try:
            self._background.join()
        finally:
            self._disconnect()
        last = max(self._kept.steps.values(), default=None)
        saved = max(self._run.steps(), default=-1)
        if finished and self._leads and self._space is not None and last is not None and saved >= last:
            _remove(self._space)

    def _disconnect(self) -> None:
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()


class _RemoteReader(DataReader):
    """A file on other hosts, read by ranges from the first of them that answers."""

    def __init__(self, path: str, size: int, holders: Sequence[tuple[Peer, str]], count: Callable[[int], None]) -> None:
        self._path = path
        self._size = size
        self._holders = holders
        self._count = count

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        memory = aligned_empty(length) if buffer is None else buffer.view(length)
        errors = []
        for peer, path in self._holders:
            try:
                peer.read(path, offset, memory.data)
            except (StorageError, DamagedCheckpointError) as error:
                errors.append(str(error))
                continue
            self._count(length)
            return memory
        raise DamagedCheckpointError(f"{self._path} of a local step: {'; '.join(errors)}", unreadable=True)

    def close(self) -> None:
        return


def _first(texts: Sequence[bytes]) -> bytes:
    return next(filter(None, texts), b"")


def _folders(place: Location) -> list[Location]:
    """Return the folders of local steps in a place; nothing else there is ours."""
    found = [place / entry.name for entry in place.entries() if entry.is_directory]
    return [folder for folder in found if not folder.is_link()]


def _record_of(folder: Location) -> CheckpointRecord | None:
    """Return the commit record of a local step; None without one that can be read: that of another host may count."""
    try:
        return CheckpointRecord.decode((folder / RECORD).read_bytes(limit=RECORD_LIMIT), source=str(folder / RECORD))
    except ObjectNotFoundError:
        return None
    except HoldfastError as error:
        _logger.warning("%s: the commit record of this local step is passed over: %s", folder, error)
        return None


def _walk(folder: Location, begin: str = "") -> Iterator[tuple[str, int]]:
    """Generate the files below a folder, except those that only a save needs; links are left out."""
    for entry in folder.entries():
        path = f"{begin}{entry.name}"
        if (folder / entry.name).is_link() or entry.name == PARTIAL or entry.name.startswith(TEMPORARY_PREFIX):
            continue
        if entry.is_directory:
            yield from _walk(folder / entry.name, f"{path}/")
        elif entry.size is not None:
            yield path, entry.size


def _remove(folder: Location) -> None:
    """Remove a local step: its record first, so that half of it never counts."""
    try:
        (folder / RECORD).remove()
        folder.remove_tree()
    except StorageError as error:
        _logger.warning("%s: this local step could not be removed, the next one will try again: %s", folder, error)


def _sequence(folder: str) -> int:
    number = folder.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 19 else 0

"""Shared reads in multi-process restores: one process reads each chunk and sends it to all others that need it.

The plan is a pure function of the arrays and of the parts that each process needs, so all processes compute the same
plan. For each array, it divides the processes into teams such that all processes that need a chunk share a team. If
an array is sharded over one mesh axis and replicated over another, a team is the set of processes that need the same
shard. One process of the team reads and verifies each chunk, and all processes read about the same number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..distributed import AllGather, Rendezvous, Teams, Transport, call_within, machine_identity
from ..errors import BarrierTimeoutError, shortened
from ..pytree import Box, Part, whole
from ..storage import aligned_empty, round_up
from .assignment import ArrayClass, ChunkAssignment, ReplicaGroups
from .digests import Bytes, Integers
from .grid import ArraySpec
from .source import SavedLeaf, TreeSource

T = TypeVar("T")

_logger = logging.getLogger("holdfast")

_ROUND = 64 << 20  # bytes that a process receives per all-gather
_FEW_BYTES = 64 << 20  # minimum number of bytes that sharing must save to justify connecting the processes
_TOO_OFTEN = 1.5  # an array is shared only if more than this many processes need each chunk on average
_MOST_CHUNKS = 4096  # maximum number of chunks per array; each chunk costs time in Python
_WORD = 8  # the size of an all-gather is a multiple of this many bytes


@dataclass(frozen=True, slots=True)
class WantedArray(ArraySpec):
    """An array of a checkpoint, and the processes that need each part of it."""

    parts: Sequence[Part] | None  # None if every process needs the whole array

    @classmethod
    def of(
        cls, shape: tuple[int, ...], chunks: tuple[int, ...], itemsize: int, parts: Sequence[Part] | None
    ) -> WantedArray:
        """Describe an array. If it has too many chunks, merge neighboring chunks, starting along the last axis."""
        joined = [max(1, size) for size in chunks]  # an empty array may have empty chunks
        for axis in reversed(range(len(shape))):
            grid = [-(-size // chunk) for size, chunk in zip(shape, joined, strict=True)]
            joined[axis] *= max(1, min(grid[axis], -(-math.prod(grid) // _MOST_CHUNKS)))
        return cls(shape, tuple(joined), itemsize, parts)


class Piece(NamedTuple):
    """A chunk that a process reads and sends to its team."""

    array: int
    box: Box
    nbytes: int


class ReadPlan:
    """Assigns each chunk of the shared arrays to the process that reads it; see the module docstring.

    Attributes:
        teams: The distinct divisions of the processes into teams, each with the indices of the arrays that use it.
        spared_bytes: Total number of bytes that sharing spares the processes from reading.
    """

    def __init__(self, wanted: Sequence[WantedArray], processes: int) -> None:
        alike: dict[Any, list[int]] = {}
        for number, array in enumerate(wanted):
            alike.setdefault((array.shape, array.chunk_shape, array.itemsize, id(array.parts)), []).append(number)
        self.teams: dict[Teams, list[int]] = {}
        self.spared_bytes = 0
        self._wanted = wanted
        classes = []
        for numbers in alike.values():
            nbytes = wanted[numbers[0]].chunk_nbytes
            if (division := _teams(wanted[numbers[0]], processes)) is None:
                continue
            teams, of_chunk, spared = division
            self.teams.setdefault(teams, []).extend(numbers)
            self.spared_bytes += spared * nbytes * len(numbers)
            classes.append(ArrayClass(np.array(numbers, np.int64), nbytes, ReplicaGroups(teams, of_chunk)))
        self._assignment = ChunkAssignment(classes, processes)

    def digest(self, fingerprint: str, names: Sequence[str]) -> str:
        """Return a digest of the plan, the array names and the checkpoint, for comparison between processes."""
        digest = hashlib.sha256(fingerprint.encode())
        # Compute the digest of each list of parts only once, because thousands of arrays may share one list.
        distinct = {id(array.parts): array.parts for array in self._wanted}
        digests = {key: hashlib.sha256(repr(parts).encode()).hexdigest() for key, parts in distinct.items()}
        for name, array in zip(names, self._wanted, strict=True):
            facts = name, array.shape, array.chunk_shape, array.itemsize, digests[id(array.parts)]
            digest.update(repr(facts).encode())
        return digest.hexdigest()

    def pieces(self, process: int, teams: Teams) -> list[Piece]:
        """Return the chunks that a process reads from the arrays shared within these teams, in order."""
        arrays, chunks = self._assignment.chunks_of(process)
        here = np.isin(arrays, self.teams[teams])
        pieces = []
        for array, chunk in zip(arrays[here].tolist(), chunks[here].tolist(), strict=True):
            box = self._wanted[array].chunk_box(chunk)
            pieces.append(Piece(array, box, box.size * self._wanted[array].itemsize))
        return pieces


def _teams(wanted: WantedArray, processes: int) -> tuple[Teams, NDArray[np.int32], int] | None:
    """Return an array's teams, each chunk's team, and the number of chunk reads saved; None for an unshared array."""
    everyone: Teams = (tuple(range(processes)),)
    count = wanted.chunks
    if count == 0 or wanted.itemsize == 0:
        return None
    if wanted.parts is None:
        return everyone, np.zeros(count, np.int32), (processes - 1) * count
    team_of = list(range(processes))  # union-find: the parent of each process; the first process of a team is the root

    def first(process: int) -> int:
        while team_of[process] != process:
            process = team_of[process]
        return process

    owners = np.full(wanted.grid, -1, np.int32)  # for each chunk, one process of its team
    numbers = np.arange(count).reshape(wanted.grid)
    chunks_of: dict[tuple[int, ...], list[Integers]] = {}  # chunk numbers, keyed by the processes that need them
    for part in wanted.parts:
        if 0 in part.shape:
            continue
        cells = wanted.cells(part.box)
        members = (*part.holders, *np.unique(owners[cells]).tolist())
        together = {first(process) for process in members if process >= 0}
        for process in together:
            team_of[process] = min(together)
        owners[cells] = min(together)
        chunks_of.setdefault(part.holders, []).append(numbers[cells].reshape(-1))
    if (owners < 0).any():
        return None  # some chunks are not needed by any process, for example because the array is truncated
    reads = sum(len(holders) * len(np.unique(np.concatenate(some))) for holders, some in chunks_of.items())
    if reads <= _TOO_OFTEN * count:
        return None
    by_first: dict[int, list[int]] = {}
    for process in sorted({process for holders in chunks_of for process in holders}):
        by_first.setdefault(first(process), []).append(process)
    teams = tuple(map(tuple, by_first.values()))
    if len(set(map(len, teams))) > 1 or sum(map(len, teams)) != processes:
        return everyone, np.zeros(count, np.int32), reads - count
    number_of = {team[0]: number for number, team in enumerate(teams)}
    of_chunk = [number_of[first(process)] for process in owners.reshape(-1).tolist()]
    return teams, np.array(of_chunk, np.int32), reads - count


class SharedReads:
    """The shared reads of one restore, which all processes of a program perform together.

    Every process calls `read` for the same trees in the same order, and then `leave`. A process that reads less than
    the others, or has to read damaged data again, calls `leave` earlier. A process whose restore fails calls `fail`.
    """

    def __init__(self, rendezvous: Rendezvous, transport: Transport, timeout: float, *, always: bool) -> None:
        """Prepare the reads; if ``always`` is set, even small reads and reads on a single machine are shared."""
        self._rendezvous = rendezvous
        self._transport = transport
        self._timeout = timeout
        self._always = always
        self._call = 0
        self._awaited: str | None = "plan"  # topic of the message that the other processes await from this one, or None

    def fail(self, error: BaseException) -> None:
        """Report the failure to the other processes, which may be waiting for this one. Never raises."""
        self._awaited = None
        self._rendezvous.fail(error)

    def leave(self) -> None:
        """Stop sharing; the other processes, which may be waiting for this one, read the rest on their own."""
        if self._awaited == "plan":
            self._together("plan", {"plan": None}, agreed_lengths)
        elif self._awaited == "read":
            self._all_have_read(f"process {self._rendezvous.index} reads on its own")
        self._awaited = None

    def close(self) -> None:
        """Close the connections; from then on, each process reads on its own."""
        self._awaited = None
        self._transport.close()
        self._rendezvous.close()

    def read(
        self,
        source: TreeSource,
        leaves: Sequence[SavedLeaf],
        parts: Sequence[Sequence[Part] | None],  # needed parts of each leaf; None if every process needs all of it
        boxes: Mapping[int, Sequence[Box]],  # boxes to read, keyed by leaf index; all other leaves are read in full
    ) -> dict[int, list[NDArray[Any]]]:
        """Read the arrays that several processes need, each chunk only once; return boxes, keyed by leaf index."""
        # If this process finds damaged data, the other processes wait until it calls `leave` or `fail`.
        if self._awaited is None:
            return {}
        arrays: dict[int, WantedArray] = {}
        dtypes: list[np.dtype[Any]] = []
        for position, (leaf, some) in enumerate(zip(leaves, parts, strict=True)):
            dtype, shape = leaf.saved.dtype, leaf.saved.shape
            if dtype is not None and shape is not None and "aggregate" not in leaf.saved.details:
                arrays[position] = WantedArray.of(shape, source.chunks(leaf), dtype.itemsize, some)
                dtypes.append(dtype)
        positions = list(arrays)
        leaves = [leaves[position] for position in positions]
        plan = ReadPlan(list(arrays.values()), self._rendezvous.count)
        shares = [plan.pieces(self._rendezvous.index, teams) for teams in plan.teams]
        facts = {
            "plan": plan.digest(source.fingerprint, [leaf.name for leaf in leaves]),
            "bytes": [sum(piece.nbytes for piece in share) for share in shares],
            "spared": plan.spared_bytes,
            "always": self._always,
            "store": not source.location.is_local,
            "machine": machine_identity(),
        }
        lengths: list[int] | None = self._together("plan", facts, agreed_lengths)
        if lengths is None:
            self._next_call()
        if not lengths:  # sharing is not worth it, or the plans differ, perhaps because the trees differ
            return {}
        gathers = self._connected(plan, lengths)
        if not gathers:
            return {}
        self._awaited = "read"
        read = _read_pieces(source, leaves, shares)
        if not self._all_have_read(None):
            return {}
        wanted = [boxes.get(position, [whole(array.shape)]) for position, array in arrays.items()]
        outputs = _Outputs(dtypes, wanted)
        for teams, share, length, (nbytes, gather) in zip(plan.teams, read, lengths, gathers, strict=True):
            team = next(team for team in teams if self._rendezvous.index in team)
            receivers = [_incoming(plan.pieces(process, teams), outputs) for process in team]
            for receiver in receivers:
                next(receiver)
            for sent in islice(_outgoing(share, nbytes), -(-length // nbytes)):
                received = self._within(f"pass arrays on to processes {shortened(team, 20)}", gather, sent)
                for receiver, data in zip(receivers, received, strict=True):
                    receiver.send(data)
        self._next_call()
        return {positions[array]: outputs.of(array) for some in plan.teams.values() for array in some}

    def _all_have_read(self, problem: str | None) -> bool:
        """Report this process's problem (None if it has none); return True if no process has a problem."""
        if (problem := self._together("read", problem, _any)) is not None:
            _logger.info("each process reads what it still needs on its own: %s", problem)
        return problem is None

    def _together(self, topic: str, value: Any, summary: Callable[[Sequence[bytes]], bytes]) -> Any:
        self._awaited = None
        message = json.dumps(value).encode()
        return json.loads(self._rendezvous.summarize(f"{topic} {self._call}", message, self._timeout, summary))

    def _next_call(self) -> None:
        self._call += 1
        self._awaited = "plan"

    def _connected(self, plan: ReadPlan, lengths: Sequence[int]) -> list[tuple[int, AllGather]]:
        """Connect all teams; return a message size in bytes and an all-gather function for each division into teams."""
        problem: str | None = None
        gathers = []
        try:
            for number, (teams, length) in enumerate(zip(plan.teams, lengths, strict=True)):
                name = f"{self._rendezvous.name}: {self._call}.{number}"
                most = max(_WORD, round_up(_ROUND // len(teams[0]), _WORD))
                nbytes = min(most, round_up(length, _WORD))
                connect = partial(self._transport.connect, name, teams, self._rendezvous.index, nbytes, self._timeout)
                gathers.append((nbytes, self._within("connect the processes", connect)))
        except Exception as error:
            problem = f"process {self._rendezvous.index}: {type(error).__name__}: {error}"
        if (problem := self._together("connect", problem, _any)) is not None:
            # A restore must not fail just because the network does not support collective operations.
            _logger.warning(
                "each process reads all that it restores, because processes cannot pass on arrays: %s", problem
            )
            return []
        return gathers

    def _within(self, purpose: str, work: Callable[..., T], *inputs: Any) -> T:
        try:
            return call_within(self._timeout, work, *inputs)
        except Exception as error:
            raise BarrierTimeoutError(
                f"{self._rendezvous.name}: process {self._rendezvous.index} could not {purpose}: "
                f"{type(error).__name__}: {error}; check the logs of the others"
            ) from error


def agreed_lengths(values: Sequence[bytes]) -> bytes:
    """Return a JSON list of each division's largest share in bytes; [] if plans differ; null if sharing is useless."""
    facts = [json.loads(value) for value in values]
    first = facts[0]
    if any(process["plan"] is None or process["plan"] != first["plan"] for process in facts):
        return b"[]"
    apart = first["store"] or len({process["machine"] for process in facts}) > 1
    worth = first["always"] or (first["spared"] >= _FEW_BYTES and apart)
    lengths = [max(nbytes) for nbytes in zip(*(process["bytes"] for process in facts), strict=True)]
    return json.dumps(lengths if lengths and worth else None).encode()


def _any(values: Sequence[bytes]) -> bytes:
    return next((value for value in values if json.loads(value) is not None), values[0])


def _read_pieces(
    source: TreeSource, leaves: Sequence[SavedLeaf], shares: Sequence[Sequence[Piece]]
) -> list[list[NDArray[Any]]]:
    """Read all shares of this process in a single call; return one array per piece, grouped by share."""
    boxes: dict[int, list[Box]] = {}
    for share in shares:
        for piece in share:
            boxes.setdefault(piece.array, []).append(piece.box)
    read = source.read_boxes([leaves[array] for array in boxes], list(boxes.values()))
    arrays = {array: iter(contents) for array, contents in zip(boxes, read, strict=True)}
    return [[next(arrays[piece.array]) for piece in share] for share in shares]


def _outgoing(arrays: list[NDArray[Any]], nbytes: int) -> Iterator[Bytes]:
    """Yield the arrays as messages of ``nbytes``, then endless padding; free each array once it has been sent."""
    waiting = arrays[::-1]
    arrays.clear()
    left: Bytes = np.empty(0, np.uint8)
    while True:
        taken = np.empty(nbytes, np.uint8)
        end = 0
        while end < nbytes and (left.size or waiting):
            if not left.size:
                left = np.ascontiguousarray(waiting.pop()).reshape(-1).view(np.uint8)
            part, left = left[: nbytes - end], left[nbytes - end :]
            taken[end : end + part.size] = part
            end += part.size
        yield taken


def _incoming(pieces: Sequence[Piece], outputs: _Outputs) -> Generator[None, Bytes, None]:
    """Receive the pieces of one process as a byte stream in messages of any size, and copy them into the outputs."""
    data = yield
    for piece in pieces:
        if not data.size:
            data = yield
        content, data = data[: piece.nbytes], data[piece.nbytes :]
        if content.size < piece.nbytes:
            part, content, filled = content, np.empty(piece.nbytes, np.uint8), 0
            while True:
                content[filled : filled + part.size] = part
                filled += part.size
                if filled == piece.nbytes:
                    break
                data = yield
                part, data = data[: piece.nbytes - filled], data[piece.nbytes - filled :]
        outputs.put(piece, content)
    while True:
        yield


class _Outputs:
    """The array boxes that this process needs; memory is allocated when the first piece of an array arrives."""

    def __init__(self, dtypes: Sequence[np.dtype[Any]], boxes: Sequence[Sequence[Box]]) -> None:
        self._dtypes = dtypes
        self._boxes = boxes
        self._arrays: dict[int, list[NDArray[Any]]] = {}

    def of(self, array: int) -> list[NDArray[Any]]:
        if array not in self._arrays:
            dtype = self._dtypes[array]
            self._arrays[array] = [
                aligned_empty(box.size * dtype.itemsize).view(dtype).reshape(box.shape) for box in self._boxes[array]
            ]
        return self._arrays[array]

    def put(self, piece: Piece, data: Bytes) -> None:
        for box, array in zip(self._boxes[piece.array], self.of(piece.array), strict=True):
            common = piece.box.common(box)
            if common is not None:
                elements = data.view(array.dtype).reshape(piece.box.shape)
                array[common.within(box)] = elements[common.within(piece.box)]

"""Options of checkpoint managers.

:class:`CheckpointOptions` declares when to save and what to keep, for managers, the callbacks of ``integrations/`` and
the ``checkpoint:`` section of recipes. The public classes repeat these signatures and docstrings, and tests check that
they match. The ``metadata`` of a field contains its smallest and largest allowed values.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any, ClassVar, TypeVar

from ..clock import Duration, Rate, bytes_per_second, seconds
from ..errors import InvalidLocationError, OptionError, UnknownArgumentError
from ..foreign_arguments import explains_arguments, instead_of
from ..storage import Location, Place, as_location, hidden_address
from .decisions import OnBest, SavePolicy
from .intervals import Every, LearnedInterval, save_interval
from .metrics import BestMode, metric_name
from .retention import (
    KeepAll,
    KeepBest,
    KeepItem,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
    KeepWithoutMetrics,
)

_SAVE_PERIODS = ("save_interval_steps", "save_interval_secs")
KEEP_PERIODS = ("max_to_keep", "keep_latest", "keep_period", "keep_time_interval")

BestFn = str | Callable[[Any], float]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _location(url: Place, shown: str) -> Location:
    try:
        return as_location(url)
    except InvalidLocationError as error:
        raise OptionError(f"{shown.format(hidden_address(str(url)))}: {error}") from error


def limits(least: int, greatest: int | None = None) -> dict[str, Any]:
    """Return the metadata of an integer option, with its smallest and largest allowed values."""
    return {"least": least, "greatest": greatest}


def option_texts(taker: type) -> dict[str, str]:
    """Map each option to its description in a class docstring; return an empty dictionary under ``python -OO``."""
    text = inspect.cleandoc(taker.__doc__ or "")
    title = "Args" if "\nArgs:" in text else "Attributes"
    sections = re.findall(rf"^{title}:.*\n((?: {{4}}.*\n?|\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def takes_texts_of(source: type) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that fills in missing option descriptions from the docstring of ``source``."""

    def complete(taker: type[T]) -> type[T]:
        texts = option_texts(source)

        def described(entry: re.Match[str]) -> str:
            indent, names = entry[1], re.findall(r"\w+", entry[2])
            wrapper = textwrap.TextWrapper(120, indent, f"{indent}    ", break_long_words=False, break_on_hyphens=False)
            return "\n".join(wrapper.fill(f"{name}: {texts[name]}") for name in names)

        if taker.__doc__ is not None:
            taker.__doc__ = re.sub(r"^( +)([a-z]\w*(?:,\s+[a-z]\w*)*):$", described, taker.__doc__, flags=re.MULTILINE)
        return taker

    return complete


def shown_call(taker: object, directory: object, options: Any) -> str:
    """Return the call that creates a manager or callback, with its directory and its non-default options."""
    values = [(option.name, getattr(options, option.name), option.default) for option in fields(options)]
    given = [f"{name}={value!r}" for name, value, default in values if default is not MISSING and value != default]
    return f"{type(taker).__name__}({', '.join([repr(str(directory)), *given])})"


def refuse_options(taker: str, unknown: Iterable[str], accepted: Collection[str]) -> None:
    """Raise UnknownArgumentError for an unknown option; suggest the equivalent if another library has this option."""
    for name in unknown:
        is_of_managers = name in CheckpointManagerOptions.__dataclass_fields__
        hint = ": only CheckpointManagerOptions takes it" if is_of_managers else instead_of(name, accepted)
        raise UnknownArgumentError(f"{taker}() got an unexpected keyword argument {name!r}{hint}")


def explains_options(taker: F) -> F:
    """Decorate a class or function so that its errors about unknown options suggest alternatives."""
    return explains_arguments(taker, refuse_options)


@explains_options
@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A second location for a run's steps, which are copied there in the background and fetched back at the start.

    Without an interval, every step is due. If copying is slower than saving, only the newest step that is due is
    copied. Without retention options, the run's retention rules apply.

    >>> Mirror("s3://bucket/run", save_interval_steps=1000, max_to_keep=2, max_bandwidth="50 MB/s").max_to_keep
    2

    Attributes:
        url: The path or URL of the mirror.
        save_interval_steps: Copy a step if it reaches or passes a multiple of this number after the last copied step.
        save_interval_secs: Copy a step if it was saved at least this long after the last copied step: a number of
            seconds, or text such as ``"15m"`` or ``"1h"``.
        max_to_keep: Keep this many of the newest checkpoints, or with ``best_fn``, of the best checkpoints. If too few
            checkpoints have the metric, the newest of the others are kept as well.
        keep_latest: Also keep this many of the newest checkpoints, even if they are not among the best.
        keep_period: Keep the first checkpoint at or past each multiple of this many steps.
        keep_time_interval: Keep every checkpoint saved at least this long after the last one kept by this rule.
        max_bandwidth: The maximum copy rate in bytes per second, or text such as ``"50 MB/s"``.
        wait_secs: The maximum time to wait for the copy of the last step at the end of a run.
    """

    url: Place = field(kw_only=False)
    save_interval_steps: int | None = field(default=None, metadata=limits(1))
    save_interval_secs: Duration | None = None
    max_to_keep: int | None = field(default=None, metadata=limits(1))
    keep_latest: int | None = field(default=None, metadata=limits(1))
    keep_period: int | None = field(default=None, metadata=limits(1))
    keep_time_interval: Duration | None = None
    max_bandwidth: Rate | None = None
    wait_secs: Duration = "10m"

    def __post_init__(self) -> None:
        _location(self.url, "mirror={!r}")
        _check_limits(self)
        if self.max_bandwidth is not None:
            bytes_per_second(self.max_bandwidth, name="max_bandwidth")
        for name in ("save_interval_secs", "keep_time_interval", "wait_secs"):
            if getattr(self, name) is not None:
                seconds(getattr(self, name), name=name)


@explains_options
@dataclass(frozen=True, kw_only=True)
class Local:
    """Saves every few steps to the memory or disk of each host, with copies on other hosts.

    A run resumes from the newest step whose files are all available on the hosts, or from the newest step in its
    directory if that is newer. With ``copies=1``, the files remain available after the loss of any one host.

    >>> Local("/dev/shm/holdfast", every=10).copies
    1

    Attributes:
        url: A path on every host, such as ``/dev/shm/holdfast`` in memory, or a folder on disk. It needs space for two
            steps, and for a third one while it is written. On each host, a step consists of the host's own files and
            its copies of other hosts' files.
        every: Save when the step reaches or passes a multiple of this number.
        copies: The number of other hosts that keep a copy of each host's files.
        failure_domain: The name of a group of hosts that may fail together, such as a rack. Copies are kept in other
            domains if possible. None treats each host as its own domain.
        host: The identity of this host, which lets processes with the same hostname act as several hosts in tests.
        address: The address at which other hosts reach this host. None uses the address of the network interface
            that leads to process 0.
    """

    url: Place = field(kw_only=False)
    every: int = field(metadata=limits(1))
    copies: int = field(default=1, metadata=limits(0))
    failure_domain: str | None = None
    host: str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if not _location(self.url, "Local({!r})").is_local:
            raise OptionError(
                f"Local({self.url!r}): this is not a path of a host; local steps lie in its memory or on its disk, "
                "such as in /dev/shm/holdfast. For a second place that all hosts share, use mirror="
            )
        _check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStatus:
    """The status of a run's host-local saves.

    Attributes:
        path: The folder with local steps on this host.
        step: The newest local step that this run has read or saved, or None.
        hosts: The number of hosts in the program.
        copies_on: The hosts that keep copies of this host's files.
        error: Why the last local save failed, or None if it succeeded.
    """

    path: str
    step: int | None
    hosts: int
    copies_on: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When to save and what to keep: the options shared by managers, callbacks and recipes.

    A step is saved when any trigger is due. If none of ``save_interval_steps``, ``save_interval_secs`` and
    ``save_on_best`` is given, ``DEFAULT_TRIGGER`` applies; otherwise, only the given triggers apply. A step is kept if
    any retention rule keeps it, and the newest step is always kept.
    """

    DEFAULT_TRIGGER: ClassVar[Mapping[str, Any]]

    save_interval_steps: int | None = field(default=None, metadata=limits(1))
    save_interval_secs: Duration | None = None
    save_on_best: bool = False
    best_fn: BestFn | None = None
    best_mode: BestMode | None = None
    max_to_keep: int | None = field(default=None, metadata=limits(1))
    keep_latest: int | None = field(default=None, metadata=limits(1))
    keep_period: int | None = field(default=None, metadata=limits(1))
    keep_time_interval: Duration | None = None
    keep_steps: Collection[int] = ()
    mirror: Place | Mirror | None = None
    local: Local | None = None
    reuse_unchanged: bool = True
    step_name_width: int | None = field(default=None, metadata=limits(1, 18))

    def __post_init__(self) -> None:
        mirror_of(self)
        if self.local is not None and not isinstance(self.local, Local):
            raise OptionError(f"local={self.local!r} must be a Local, such as Local('/dev/shm/holdfast', every=10)")
        if self.save_on_best and self.best_fn is None:
            raise OptionError("save_on_best=True needs best_fn: the name of a metric, or a function of the metrics")
        _check_limits(self)
        if self.best_fn is not None and not (
            callable(self.best_fn) or (isinstance(self.best_fn, str) and self.best_fn)
        ):
            raise OptionError(f"best_fn={self.best_fn!r} must be the name of a metric or a function of the metrics")
        if self.best_mode not in (None, "max", "min"):
            raise OptionError(f"best_mode={self.best_mode!r} must be 'max' or 'min'")
        if isinstance(self.best_fn, str) and self.best_mode is None:
            raise OptionError(
                f"best_fn={self.best_fn!r} needs best_mode: best_mode='min' if the smallest value is best, as of a "
                "loss, or best_mode='max' if the largest is, as of an accuracy"
            )
        if not isinstance(self.keep_steps, Collection) or isinstance(self.keep_steps, str):
            raise OptionError(f"keep_steps={self.keep_steps!r} must be a collection of steps")
        if not isinstance(self.reuse_unchanged, bool):
            raise OptionError(f"reuse_unchanged={self.reuse_unchanged!r} must be True or False")
        save_triggers(self)
        if self.keep_time_interval is not None:
            seconds(self.keep_time_interval, name="keep_time_interval")

    @property
    def ranking_mode(self) -> BestMode:
        """Whether the largest or the smallest metric is best: ``best_mode``, or "max" if ``best_mode`` is None."""
        return self.best_mode or "max"

    def policies(self) -> tuple[tuple[SavePolicy, ...], tuple[KeepPolicy, ...]]:
        """Return the custom policies for when to save and what to keep."""
        return (), ()


@dataclass(frozen=True, kw_only=True)
class ProgramPolicies(CheckpointOptions):
    """Options that also accept custom policies."""

    save: SavePolicy | Sequence[SavePolicy] | None = None
    keep: KeepPolicy | Sequence[KeepPolicy] | None = None

    def __post_init__(self) -> None:
        saves, keeps = self.policies()
        for name, given, protocol, others in (
            ("save", saves, SavePolicy, _SAVE_PERIODS),
            ("keep", keeps, KeepPolicy, KEEP_PERIODS),
        ):
            for policy in given:
                if not isinstance(policy, protocol) or isinstance(policy, type):
                    raise OptionError(
                        f"{name}={policy!r} must be a hf.{protocol.__name__}, such as hf.Every(steps=100, keep=5), or "
                        "a list of them"
                    )
            also = [f"{other}={value!r}" for other in others if (value := getattr(self, other)) is not None]
            if also and any(isinstance(policy, Every) for policy in given):
                raise OptionError(
                    f"{', '.join(also)} and policies of {name}= say the same: add hf.Every(...) to the list of policies"
                )
        super().__post_init__()

    def policies(self) -> tuple[tuple[SavePolicy, ...], tuple[KeepPolicy, ...]]:
        saves, keeps = listed_policies(self.save), listed_policies(self.keep)
        if self.keep is None:
            periods = [policy for policy in saves if isinstance(policy, Every)]
            keeps = tuple(periods) if any(policy.keep is not None for policy in periods) else ()
        return saves, keeps


def listed_policies(policies: Any) -> tuple[Any, ...]:
    if policies is None:
        return ()
    return tuple(policies) if isinstance(policies, Iterable) else (policies,)


@explains_options
@dataclass(frozen=True, kw_only=True)
class CheckpointManagerOptions(ProgramPolicies):
    """When a manager saves and which checkpoints it keeps.

    A step is saved when any of ``save_interval_steps``, ``save_interval_secs`` and ``save_on_best`` requires it. If
    none of these is given, every step is saved. A checkpoint is kept if any retention rule keeps it, and the newest
    checkpoint is always kept.

    Attributes:
        save_interval_steps: Save when the step reaches or passes a multiple of this number.
        save_interval_secs: Save when this much time has elapsed since the last save: a number of seconds, or text such
            as ``"15m"`` or ``"1h"``. ``"auto"``, or ``"auto 1m to 1h"`` with lower and upper bounds, learns from the
            run's events which interval loses the least training time.
        save_on_best: Save when the metric is better than in every earlier checkpoint; requires ``best_fn``.
        best_fn: The metric that ranks checkpoints, as a name or as a function of the metrics.
        best_mode: Whether the largest (``"max"``) or the smallest (``"min"``) value of the metric is best; required
            if ``best_fn`` is a name. If it is a function, None means the largest value.
        max_to_keep: Keep this many of the newest checkpoints, or with ``best_fn``, of the best checkpoints. If too few
            checkpoints have the metric, the newest of the others are kept as well. None keeps all checkpoints.
        keep_latest: Also keep this many of the newest checkpoints, even if they are not among the best.
        keep_period: Keep the first checkpoint at or past each multiple of this many steps.
        keep_time_interval: Keep every checkpoint saved at least this long after the last one kept by this rule;
            ``"1h"`` keeps about one checkpoint per hour.
        keep_steps: Keep the checkpoints of these steps.
        mirror: A second location to which steps are copied in the background, such as ``s3://bucket/run``, or a
            ``Mirror`` with its own interval and limits. A run resumes from the newest step in either location.
        local: A ``Local``, which saves every few steps to the memory or disk of each host, with copies on other
            hosts. A run resumes from a local step if it is newer than the steps in the directory.
        reuse_unchanged: Instead of writing unchanged arrays again, reuse their data files from the step before the last
            one: as hard links or, in S3 and Google Cloud Storage, as copies within the store. Each step remains
            complete, and can be copied or deleted independently.
        step_name_width: The minimum number of digits in step names in a new directory, such as 8 for
            ``00001200``; versions without this option refuse such a directory. An existing directory keeps its names.
        save: One or more policies for when to save, such as ``hf.Every(steps=100)`` or a custom ``hf.SavePolicy``,
            instead of ``save_interval_steps`` and ``save_interval_secs``. A step is saved when any policy is due.
        keep: One or more policies for what to keep, such as ``hf.Every(steps=100, keep=5)`` or a custom
            ``hf.KeepPolicy``, instead of ``max_to_keep``, ``keep_latest``, ``keep_period`` and ``keep_time_interval``.
            By default, the ``hf.Every`` policies of ``save`` apply if any of them has ``keep``; otherwise, everything
            is kept unless other options limit it.
        keep_checkpoints_without_metrics: Keep all checkpoints without metrics. By default, the other rules apply to
            them as well.
        item_intervals: For a manager with several items, a dictionary of intervals, in steps, for items that only some
            checkpoints need, such as a replay buffer. Each item is saved by the first save, by saves at or past
            a multiple of its interval, and with ``force=True``. The newest checkpoint with the item is kept.
        step_prefix: Name step directories ``<step_prefix>_<step>`` instead of ``<step>``. The underscore is omitted
            after a prefix that ends in ``-``.
        read_only: Never save, delete or sweep steps, so that the directory may belong to another run.
        save_timeout_secs: The maximum time to wait for a save: a number of seconds, or text such as ``"10m"``.
        barrier_timeout_secs: The maximum time to wait for the program's other processes before an error names the
            missing ones: a number of seconds, or text such as ``"10m"``.
        load_and_broadcast: Whether data that several processes restore is read only once, and distributed by
            collective operations of JAX or torch. None enables this if it avoids reading at least 64 MiB, and the
            program runs on several machines or the checkpoint is in an object store. False disables it. True always
            enables it, even for ``restore(step)``.
    """

    DEFAULT_TRIGGER: ClassVar[Mapping[str, Any]] = {"save_interval_steps": 1}

    keep_checkpoints_without_metrics: bool = False
    item_intervals: Mapping[str, int] = field(default_factory=dict)
    step_prefix: str | None = None
    read_only: bool = False
    save_timeout_secs: Duration = "1h"
    barrier_timeout_secs: Duration = "10m"
    load_and_broadcast: bool | None = None

    def __post_init__(self) -> None:
        if self.load_and_broadcast not in (None, True, False):
            raise OptionError(f"load_and_broadcast={self.load_and_broadcast!r} must be True, False or None")
        if self.step_prefix is not None and (not self.step_prefix or set("/\\\0") & set(self.step_prefix)):
            raise OptionError(f"step_prefix={self.step_prefix!r} cannot be part of a directory's name")
        intervals = self.item_intervals
        if not isinstance(intervals, Mapping) or not all(type(n) is int and n >= 1 for n in intervals.values()):
            raise OptionError(f"item_intervals={intervals!r} must be a dictionary of whole numbers of steps by item")
        seconds(self.save_timeout_secs, name="save_timeout_secs")
        seconds(self.barrier_timeout_secs, name="barrier_timeout_secs")
        super().__post_init__()

    def _time_rule(self, secs: float) -> KeepPolicy:
        return Every(secs=secs)


def mirror_of(options: CheckpointOptions) -> Mirror | None:
    mirror = options.mirror
    return mirror if mirror is None or isinstance(mirror, Mirror) else Mirror(mirror)


def has_triggers(options: CheckpointOptions) -> bool:
    """Return whether any option determines when to save; if none does, the default trigger applies."""
    has_period = any(getattr(options, name) is not None for name in _SAVE_PERIODS)
    return has_period or options.save_on_best or bool(options.policies()[0])


def save_triggers(options: CheckpointOptions) -> tuple[SavePolicy, ...]:
    if not has_triggers(options):
        return save_triggers(replace(options, **options.DEFAULT_TRIGGER))
    triggers: list[SavePolicy] = [*options.policies()[0]]
    if options.save_interval_steps is not None:
        triggers.append(Every(steps=options.save_interval_steps))
    if options.save_interval_secs is not None:
        interval = save_interval(options.save_interval_secs)
        triggers.append(LearnedInterval(*interval) if isinstance(interval, tuple) else Every(secs=interval))
    if options.save_on_best and options.best_fn is not None:
        triggers.append(OnBest(options.best_fn, options.ranking_mode))
    return tuple(triggers)


def retention_rules(options: CheckpointManagerOptions) -> tuple[KeepPolicy, ...]:
    """Return the retention rules, which keep all steps unless ``max_to_keep``, ``keep_latest`` or a policy is given."""
    rules: list[KeepPolicy] = [*options.policies()[1]]
    is_limited = bool(rules) or options.max_to_keep is not None or options.keep_latest is not None
    if options.best_fn is not None:
        rules.append(KeepBest(options.max_to_keep or 1, options.best_fn, options.ranking_mode))
    elif options.max_to_keep is not None:
        rules.append(KeepLatest(options.max_to_keep))
    if options.keep_latest is not None:
        rules.append(KeepLatest(options.keep_latest))
    if options.keep_period is not None:
        rules.append(Every(steps=options.keep_period))
    if options.keep_time_interval is not None:
        rules.append(options._time_rule(seconds(options.keep_time_interval, name="keep_time_interval")))
    if options.keep_steps:
        rules.append(KeepSteps(frozenset(options.keep_steps)))
    if not is_limited:
        rules.append(KeepAll())
    rules.extend(map(KeepItem, options.item_intervals))
    if options.keep_checkpoints_without_metrics:
        rules.append(KeepWithoutMetrics())
    return tuple(rules)


def options_document(options: CheckpointManagerOptions) -> dict[str, Any]:
    """Convert the retention options to a JSON document for readers of the directory."""
    function, policies = options.best_fn, options.policies()[1]
    custom = [type(policy).__qualname__ for policy in policies if not isinstance(policy, Every)]
    interval = options.keep_time_interval
    return {
        "keep": [asdict(policy) for policy in policies if isinstance(policy, Every)],
        "keep_function": ", ".join(custom) or None,  # only names, because the policies cannot be stored
        "max_to_keep": options.max_to_keep,
        "keep_latest": options.keep_latest,
        "keep_period": options.keep_period,
        "keep_time_interval": None if interval is None else seconds(interval, name="keep_time_interval"),
        "keep_steps": sorted(map(int, options.keep_steps)),
        "best_fn": function if isinstance(function, str) else None,
        "best_function": metric_name(function) if callable(function) else None,  # a function itself cannot be stored
        "best_mode": options.ranking_mode,
        "keep_checkpoints_without_metrics": options.keep_checkpoints_without_metrics,
        "item_intervals": dict(options.item_intervals),
        "step_name_width": options.step_name_width,
    }


def options_from_document(document: Mapping[str, Any]) -> CheckpointManagerOptions:
    """Parse the result of :func:`options_document`, ignoring unknown names; raise OptionError for invalid values."""
    names = options_document(CheckpointManagerOptions()).keys() & CheckpointManagerOptions.__dataclass_fields__.keys()
    try:
        values = {name: value for name, value in document.items() if name in names}
        values["keep"] = [Every(**policy) for policy in values.get("keep", ())]
        return CheckpointManagerOptions(read_only=True, **{"best_mode": "max", **values})
    except (TypeError, AttributeError) as error:
        raise OptionError(f"these are not options of a checkpoint manager: {error}") from error


def as_int(value: object) -> object:
    """Convert an integer from any library to int; return all other values, including booleans, unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_limits(options: Any) -> None:
    """Convert integer options to int; raise OptionError if one of them is not an integer or is out of range."""
    for option in fields(options):
        value, is_optional = as_int(getattr(options, option.name)), option.default is None
        if "least" not in option.metadata or (value is None and is_optional):
            continue
        least, greatest = option.metadata["least"], option.metadata["greatest"]
        limits = f"of at least {least}" if greatest is None else f"from {least} to {greatest}"
        if type(value) is not int or value < least or (greatest is not None and value > greatest):
            or_none = ", or None" if is_optional else ""
            raise OptionError(f"{option.name}={value!r} must be a whole number {limits}{or_none}")
        object.__setattr__(options, option.name, value)

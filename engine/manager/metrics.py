"""Look up and compare the metrics of a step, and convert metrics to their stored form.

Metrics are a dictionary whose values are numbers, or lists, arrays, dictionaries and other containers of numbers.
Metrics without named entries are stored in a dictionary under the key ``""``, and are unwrapped when returned.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from ..errors import OptionError, did_you_mean, shortened

_logger = logging.getLogger("holdfast")

# The name of a metric, with ``/`` between the keys of nested mappings, or a function of all metrics of a step.
Metric = str | Callable[[Any], Any]

BestMode = Literal["max", "min"]  # whether larger or smaller values are better

_ABSENT = object()
_NAMELESS = "metric"  # name for the result of a lambda
_WHOLE = ""  # key under which non-dictionary metrics are stored
_MOST = 4096  # maximum number of values in an array or list
_OF_EVALUATION = re.compile(r"(val|valid|validation|eval|evaluation|test|dev)(?![a-z])", re.IGNORECASE)
_PATIENCE = 1000  # number of steps after which a missing evaluation metric causes a warning


def metric_value(metrics: Mapping[str, Any] | None, metric: Metric) -> float | None:
    """Return one metric of a step as a number, or None if it is missing, NaN or not a number."""
    if metrics is None:
        return None
    if isinstance(metric, str):
        return _rank(_lookup(metrics, metric))
    try:
        return _rank(metric(as_given(metrics)))
    except KeyError:
        return None


def metric_name(metric: Metric) -> str:
    """Return the name of a metric, or of the function that computes it, for messages."""
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else _NAMELESS


def shown_metric(name: str) -> str:
    return "the metric that best_fn returns" if name == _NAMELESS else f"the metric {name}"


def _lookup(metrics: Mapping[str, Any], name: str) -> Any:
    # Keys may contain slashes, so try all possible splits of the name, longest key first.
    if name in metrics:
        return metrics[name]
    parts = name.split("/")
    for count in reversed(range(1, len(parts))):
        inner = metrics.get("/".join(parts[:count]))
        if isinstance(inner, Mapping) or (inner := _entries(inner)):
            value = _lookup(inner, "/".join(parts[count:]))
            if value is not _ABSENT:
                return value
    return _ABSENT


def number_of(value: Any) -> int | float | None:
    """Convert a value or one-element array to a plain number; return None if this is impossible."""
    if not isinstance(value, (int, float)):
        # Accept a one-element array regardless of its shape; `float` would warn about the shape (1,). Errors in
        # ``item()`` propagate, because a failed computation of the array must not look like a missing metric.
        if math.prod(getattr(value, "shape", ())) != 1:
            return None
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _rank(value: Any) -> float | None:
    number = number_of(value)
    try:
        return None if number is None or math.isnan(number) else float(number)
    except OverflowError:  # integer too large for a float
        return None


def named(metrics: Any) -> Mapping[str, Any]:
    if isinstance(metrics, Mapping):
        return metrics
    fields = _fields(metrics)
    return {_WHOLE: metrics} if fields is None else fields


def as_given(metrics: Mapping[str, Any]) -> Any:
    """Unwrap metrics that :func:`named` wrapped because they were not a dictionary; return others unchanged."""
    return metrics[_WHOLE] if metrics.keys() == {_WHOLE} else metrics


def plain_metrics(metrics: Any, *, omitted: Callable[[str, Exception], None] | None = None) -> dict[str, Any]:
    """Convert metrics to plain numbers in dictionaries and lists; call ``omitted`` for each rejected entry."""
    plain: dict[str, Any] = _plain(named(metrics), "", omitted)
    return plain


def plain_containers(metrics: Mapping[str, Any]) -> Any:
    """Convert metric containers to dictionaries and lists without transferring values from a device."""
    fields = _fields(metrics)
    if fields is not None:
        return {str(key): plain_containers(value) for key, value in fields.items()}
    return [plain_containers(value) for value in metrics] if isinstance(metrics, (list, tuple)) else metrics


def _plain(value: Any, path: str, omitted: Callable[[str, Exception], None] | None) -> Any:
    fields = _fields(value)
    if fields is not None:
        entries: dict[str, Any] = {}
        for key, inner in fields.items():
            try:
                entries[str(key)] = _plain(inner, f"{path}/{key}" if path else str(key), omitted)
            except (OptionError, RuntimeError) as error:  # for example because the computation of an array failed
                if omitted is None:
                    raise
                omitted(f"{path}/{key}" if path else str(key), error)
        return entries
    number = None if isinstance(value, (list, tuple)) else number_of(value)
    if number is not None:
        return number
    shape = (len(value),) if isinstance(value, (list, tuple)) else getattr(value, "shape", ())
    if not (isinstance(value, (list, tuple)) or (shape and hasattr(value, "tolist"))):
        raise OptionError(f"metric {path!r} is not a number but {value!r:.60}")
    if math.prod(shape) > _MOST:
        raise OptionError(f"metric {path!r} has {math.prod(shape)} numbers, more than {_MOST}: save it as an item")
    values = value if isinstance(value, (list, tuple)) else value.tolist()
    return [_plain(inner, f"{path}/{index}", None) for index, inner in enumerate(values)]


def _entries(value: Any) -> dict[str, Any]:
    """Return the entries of a container; for lists and arrays, the keys are the indices."""
    fields = _fields(value)
    if fields is None and (isinstance(value, (list, tuple)) or bool(getattr(value, "shape", None))):
        fields = {str(index): inner for index, inner in enumerate(value)}
    return fields or {}


def _fields(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a mapping, namedtuple or dataclass; None for all other types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


# ---- missing metrics


class MetricWatch:
    """Warns once if steps lack the metric that ranks checkpoints, probably because its name is misspelled."""

    def __init__(self, metric: Metric, where: str) -> None:
        self.metric = metric
        self._where = where
        self._steps = 0

    def note(self, step: int, metrics: Mapping[str, Any] | None, saved: Iterable[float | None]) -> bool:
        """Check a step's metrics without device transfers; return whether the watch ends, perhaps with the warning."""
        # ``saved`` yields the ranking metric of each saved step.
        self._steps += 1
        if not metrics and self._steps < _PATIENCE:
            return False
        missing, value = _missing(metrics or {}, self.metric)
        names = list(_names(metrics or {}))
        if missing is None or any(value is not None for value in saved):
            return True
        # An evaluation metric, such as val_loss, may be missing for many steps, because loops evaluate rarely.
        if self._steps < _PATIENCE and _OF_EVALUATION.match(missing) and not any(map(_OF_EVALUATION.match, names)):
            return False
        about = f"; reported: {shortened(names) or 'no metrics'}{did_you_mean(missing, names)}"
        if value is _ABSENT:
            problem = f"without {shown_metric(missing)}, by which best_fn ranks checkpoints"
        else:
            computed = missing == _NAMELESS and callable(self.metric)
            given = "metrics of which best_fn makes" if computed else f"a metric {missing} that is"
            problem = f"with {given} {_kind(value)}, and best_fn ranks checkpoints by a number"
            about = about if computed and value is None else ""
        text = (
            "%s: step %d was reported %s%s. A step without it is never the best, and save_on_best does not save it. "
            "All is well if it comes later, such as from an evaluation"
        )
        _logger.warning(text, self._where, step, problem, about)
        return True


def _kind(value: Any) -> str:
    if value is None or isinstance(value, str):
        return repr(value)[:60]
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of the shape {list(shape)}")


def _missing(metrics: Mapping[str, Any], metric: Metric) -> tuple[str | None, Any]:
    """Return a metric's name (None if its value is a number) and its value (``_ABSENT`` if the metric is missing)."""
    name, value = metric_name(metric), _ABSENT
    try:
        value = _lookup(metrics, metric) if isinstance(metric, str) else metric(as_given(metrics))
    except KeyError as error:
        name = str(error.args[0]) if error.args else name
    except Exception:  # raised again by the save that ranks this step
        return None, None
    # Check types and shapes only, to avoid transferring values from a device.
    others = (type(None), str, bytes, bytearray, Mapping, list, tuple)
    is_number = value is not _ABSENT and not isinstance(value, others) and math.prod(getattr(value, "shape", ())) == 1
    return None if is_number else name, value


def _names(metrics: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in metrics.items():
        yield from _names(value, f"{path}{name}/") if isinstance(value, Mapping) else [f"{path}{name}"]

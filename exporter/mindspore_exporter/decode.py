"""What a train cell returned, as numbers: held by reference on the training thread, read in the worker.

`retain` runs in the hook: it keeps references of small tensors and converts none. `Decoder` runs in the worker: it names
the losses and finds overflow, loss scale, learning rate and gradient norm by the class of the train cell. Nothing here
imports MindSpore; a tensor is whatever has `asnumpy`, `item` and `size`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from .config import LossConfig
from .records import RecordedValues

log = logging.getLogger(__name__)

MAX_ELEMENTS = 1024
"""Elements of the largest tensor that is held."""
MAX_LEAVES = 64
"""Values of one record at most."""
MAX_ELEMENTS_OF_RECORD = 8192
"""Elements that all tensors of one record may have: 64 KiB at most, so that eight waiting records stay under 1 MiB."""
MAX_DEPTH = 8
KEPT_OF_LONG = 4
"""What is kept of a tuple or dict that is too long, and how many values left out end the looking at one: a train cell that
returns every gradient costs no more than this."""
MAX_KNOWN_TYPES = 256
MAX_NAME = 64
"""Longest name of a loss, in characters."""
MAX_SAYINGS = 64
"""Different messages of one decoder: names from the outputs must not fill the log."""

SCALED_CELLS = frozenset(
    {
        "TrainOneStepWithLossScaleCell",
        "BoostTrainOneStepWithLossScaleCell",
        "_TrainGradAccuWithLossScaleCell",
        "MFTrainOneStepCell",
        "MFPipelineWithLossScaleCell",
    }
)
"""Classes of MindSpore and MindSpore Transformers that return (loss, overflow, loss scale), the latter's two also the
learning rate and the gradient norm, and with `local_norm` two more (`mindformers/wrapper/wrapper.py`)."""
SCALED_LENGTHS = (2, 3, 4, 5, 7)
"""Lengths that such outputs have; 7 with every parameter's local norm and their sizes, which are no step's numbers."""


# --- on the training thread ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dropped:
    """Stands where something was left out: `size` elements (or values) of a `what`."""

    what: str
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """A Parameter among the outputs: it holds the value of whenever it is read, not that of its step."""

    value: Any


class Named(NamedTuple):
    """A retained dict."""

    names: tuple[Any, ...]
    values: tuple[Any, ...]


_Budget: TypeAlias = "list[int]"
"""Values and elements that may still be kept of a record."""
_Keeper: TypeAlias = Callable[[Any, int, _Budget], Any]


def retain(outputs: Any) -> Any:
    """What the queue holds of a train cell's outputs: an immutable structure of references.

    Keeps tensors of at most 1,024 elements, numbers, bools, None and (copied, their buffers may be used again) NumPy
    arrays, in at most 64 places of nested tuples, lists and dicts; a `Dropped` stands for everything else, so that
    positions stay. A Parameter is wrapped in `Live`. Training thread: converts no tensor and never raises.
    """
    return _keep(outputs, 0, [MAX_LEAVES, MAX_ELEMENTS_OF_RECORD])


def _keep(value: Any, depth: int, budget: _Budget) -> Any:
    try:
        return (_KEEPERS.get(type(value)) or _keeper_of(type(value)))(value, depth, budget)
    except Exception:
        # Whatever a foreign object raises, the step goes on.
        return Dropped(type(value).__name__, 0)


def _keep_tensor(value: Any, _: int, budget: _Budget) -> Any:
    size = value.size
    if size <= 1:
        return value
    if size > MAX_ELEMENTS or size > budget[1]:
        return Dropped(type(value).__name__, size)
    budget[1] -= size
    return value


def _keep_array(value: Any, depth: int, budget: _Budget) -> Any:
    kept = _keep_tensor(value, depth, budget)
    return kept if kept.__class__ is Dropped else value.copy()


def _keep_parameter(value: Any, _: int, __: _Budget) -> Any:
    return Live(value) if value.size == 1 else Dropped(type(value).__name__, value.size)


def _keep_plain(value: Any, _: int, __: _Budget) -> Any:
    return value


def _keep_sequence(value: Any, depth: int, budget: _Budget) -> Any:
    kept = _keep_some(value, len(value), depth, budget)
    left = len(value) - len(kept)
    return (*kept, Dropped(f"rest of a {type(value).__name__}", left)) if left else tuple(kept)


def _keep_mapping(value: Any, depth: int, budget: _Budget) -> Any:
    kept = _keep_some(value.values(), len(value), depth, budget)
    names = tuple(islice(value, len(kept)))
    left = len(value) - len(kept)
    if left:
        return Named((*names, "..."), (*kept, Dropped(f"rest of a {type(value).__name__}", left)))
    return Named(names, tuple(kept))


def _keep_some(values: Iterable[Any], count: int, depth: int, budget: _Budget) -> list[Any]:
    """The first values. Where several had to be left out these are gradients or activations: the rest is not looked at."""
    kept: list[Any] = []
    left_out = 0
    for value in islice(values, _places(count, depth, budget)):
        held = _keep(value, depth + 1, budget)
        kept.append(held)
        if held.__class__ is Dropped:
            left_out += 1
            if left_out == KEPT_OF_LONG:
                break
    return kept


def _places(count: int, depth: int, budget: _Budget) -> int:
    """How many of a container's values are kept; takes them off the budget."""
    if depth >= MAX_DEPTH:
        return 0
    if count > budget[0]:
        if budget[0] <= KEPT_OF_LONG:
            return 0
        count = KEPT_OF_LONG
    budget[0] -= count
    return count


def _drop(value: Any, _: int, __: _Budget) -> Any:
    return Dropped(type(value).__name__, 0)


_KEEPERS: dict[type, _Keeper] = dict.fromkeys((bool, int, float, type(None)), _keep_plain)
"""How values of a type are kept. A type is looked at once: this is what makes `retain` cheap."""


def _keeper_of(kind: type) -> _Keeper:
    keeper = _classify(kind)
    if len(_KEEPERS) < MAX_KNOWN_TYPES:
        _KEEPERS[kind] = keeper
    return keeper


def _classify(kind: type) -> _Keeper:
    ancestors = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
    if ("mindspore", "Parameter") in ancestors:
        return _keep_parameter
    if ("numpy", "ndarray") in ancestors:
        return _keep_array
    if ("numpy", "generic") in ancestors or issubclass(kind, (int, float)):
        return _keep_plain
    if issubclass(kind, (tuple, list)):
        return _keep_sequence
    if issubclass(kind, Mapping):
        return _keep_mapping
    return _keep_tensor if all(hasattr(kind, name) for name in ("asnumpy", "item", "size")) else _drop


# --- reading what was retained ------------------------------------------------------------------------------------------


def read_now(retained: Any) -> tuple[float, ...]:
    """The numbers of all values of one element, in walking order, and the mean of a larger one that comes first.

    Waits for the device. A Parameter is left out: two reads of it may differ rightly.
    """
    numbers: list[float] = []
    for position, leaf in enumerate(_leaves(retained)):
        value = _scalar(leaf)
        if value is None and position == 0:
            value = _mean(leaf)
        if value is not None:
            numbers.append(float(value))
    return tuple(numbers)


def freeze(retained: Any) -> Any:
    """The same structure with numbers (arrays, where there are several) in place of tensors; `Decoder` reads it alike.

    Waits for the device.
    """
    kind = type(retained)
    if kind is tuple:
        return tuple([freeze(value) for value in retained])
    if kind is Named:
        return Named(retained.names, freeze(retained.values))
    if kind is Live:
        return Live(_scalar(retained.value))
    if kind is RecordedValues:
        return RecordedValues(*[freeze(value) for value in _recorded(retained)])
    if hasattr(retained, "asnumpy"):
        return retained.item() if retained.size == 1 else retained.asnumpy().copy()
    return retained


def footprint(retained: Any) -> int:
    """Upper bound of the bytes that a retained structure holds, counting eight bytes an element."""
    if retained is None:
        return 0
    kind = type(retained)
    if kind is tuple:
        return 64 + sum(map(footprint, retained))
    if kind is Named:
        return footprint(retained.names) + footprint(retained.values)
    if kind is RecordedValues:
        return footprint(_recorded(retained))
    return 256 if kind in (Dropped, Live) else 256 + 8 * int(getattr(retained, "size", 1))


def _leaves(node: Any) -> Iterator[Any]:
    kind = type(node)
    if kind is Named:
        node, kind = node.values, tuple
    elif kind is RecordedValues:
        node, kind = _recorded(node), tuple
    if kind is tuple:
        for value in node:
            yield from _leaves(value)
    elif kind not in (Dropped, Live) and node is not None:
        yield node


def _recorded(values: RecordedValues) -> tuple[Any, ...]:
    return tuple([getattr(values, field.name) for field in fields(values)])


def _scalar(leaf: Any) -> float | None:
    """A leaf's number (a bool stays one), None where it is not one real number."""
    kind = type(leaf)
    if kind is float or kind is bool or leaf is None:
        return leaf  # type: ignore[no-any-return]
    if kind in (tuple, Named, Dropped, Live):
        return None
    value = leaf if isinstance(leaf, (int, float)) else leaf.item() if leaf.size == 1 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if -(2**1000) < value < 2**1000 else None
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else None


def _mean(leaf: Any) -> float | None:
    """Mean over all elements, as MindSpore's `LossMonitor` takes it; in float32 where the elements have half precision."""
    if not getattr(leaf, "size", 0):
        return None
    array = leaf.asnumpy() if hasattr(leaf, "asnumpy") else leaf
    if str(array.dtype) in ("float16", "bfloat16"):
        array = array.astype("float32")
    return float(array.mean()) if array.dtype.kind in "fiu" else None


# --- in the worker ------------------------------------------------------------------------------------------------------

_Path: TypeAlias = "tuple[str, ...]"


class Decoded(NamedTuple):
    """The numbers of one record. `losses`: "total" first where there is one, then the parts by name. What the train cell
    does not return is None."""

    losses: Mapping[str, float]
    overflow: bool | None = None
    loss_scale: float | None = None
    learning_rates: tuple[float, ...] | None = None
    gradient_norm: float | None = None
    parameter_norm: float | None = None
    update_ratio: float | None = None


class Decoder:
    """Reads the outputs of one train cell.

    `train_cell`: names of its classes, most derived first. `unknown` counts values that could not be read as anything;
    each is named once in the log.

    - Of a loss-scaled cell, and of any cell whose second output is a bool: (loss, overflow, loss scale, learning rate,
      gradient norm, ...) by position.
    - Of `TrainOneStepCell(return_grad=True)`: (loss, gradients).
    - Else all outputs are losses. `total` is element 0 of a tuple; `loss`, else `total`, else the only number, else the
      sum of a dict; `loss.total` in the configuration overrides. The parts are named by `loss.names`, a dict's keys, a
      tuple's positions ("1" is the first after the total); keys of nested ones are joined by dots.
    """

    def __init__(self, train_cell: tuple[str, ...], loss: LossConfig) -> None:
        self.unknown = 0
        self._loss = loss
        self._scaled_cell = bool(train_cell) and train_cell[0] in SCALED_CELLS
        self._plain_cell = bool(train_cell) and train_cell[0] == "TrainOneStepCell"
        self._may_return_gradients = "TrainOneStepCell" in train_cell
        self._said: set[str] = set()

    def decode(self, retained: Any) -> Decoded:
        """Numbers of what `retain` or `freeze` gave. Waits for the device, so never on the training thread. What a
        device raises on the read goes through; a shape that nobody knows does not raise."""
        kind = type(retained)
        if kind is RecordedValues:
            return self._of_loop(retained)
        if kind is tuple:
            if self._is_scaled(retained):
                return self._scaled(retained)
            if self._has_gradients(retained):
                return Decoded(self._losses(retained[0]))
        return Decoded(self._losses(retained))

    def compare(self, retained: Any, immediate: tuple[float, ...]) -> bool:
        """Whether a late read gives the numbers of `read_now`; NaN equals NaN, a read that fails equals nothing."""
        try:
            late = read_now(retained)
        except Exception:
            log.exception("exporter: an output of the train cell cannot be read after its step")
            return False
        return len(late) == len(immediate) and all(
            a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(late, immediate, strict=True)
        )

    # --- the forms --------------------------------------------------------------------------------------------------

    def _is_scaled(self, outputs: tuple[Any, ...]) -> bool:
        """A bool in the second place says so for any class; without it only the frameworks' own classes are believed,
        because a class derived from one may return (loss, loss_cls, loss_bbox, loss_giou)."""
        return len(outputs) >= 2 and (self._scaled_cell or _is_bool(outputs[1]))

    def _has_gradients(self, outputs: tuple[Any, ...]) -> bool:
        """A class derived from TrainOneStepCell may return (loss, {part: scalar}) too; gradients are not all scalars."""
        if not self._may_return_gradients or len(outputs) != 2 or type(outputs[1]) is not Named:
            return False
        return self._plain_cell or any(getattr(leaf, "size", 1) != 1 for leaf in outputs[1].values)

    def _scaled(self, outputs: tuple[Any, ...]) -> Decoded:
        loss, overflow, scale, rate, norm = (*outputs, None, None, None)[:5]
        if len(outputs) not in SCALED_LENGTHS:
            for position in range(5, len(outputs)):
                self._leave_out(str(position), outputs[position])
        overflowed = _scalar(overflow)
        # A Parameter's value is that of another step; the optimiser's rate is read elsewhere (learning_rate.py).
        rates = (self._finite(rate, "learning rate"),) if type(rate) not in (Live, tuple) else ()
        return Decoded(
            losses=self._losses(loss),
            overflow=None if overflowed is None else bool(overflowed),
            loss_scale=self._finite(scale.value if type(scale) is Live else scale, "loss scale"),
            learning_rates=tuple([value for value in rates if value is not None]) or None,
            gradient_norm=self._number(norm, "gradient norm"),
        )

    def _of_loop(self, values: RecordedValues) -> Decoded:
        rates = [
            self._finite(rate.value if type(rate) is Live else rate, "learning_rate") for rate in values.learning_rates
        ]
        overflow = _scalar(values.overflow)
        scale = values.loss_scale
        return Decoded(
            losses=self._losses(values.losses) if values.losses else {},
            overflow=None if overflow is None else bool(overflow),
            loss_scale=self._finite(scale.value if type(scale) is Live else scale, "loss_scale"),
            learning_rates=tuple([rate for rate in rates if rate is not None]) or None,
            gradient_norm=self._number(values.gradient_norm, "gradient_norm"),
            parameter_norm=self._finite(values.parameter_norm, "parameter_norm"),
            update_ratio=self._finite(values.update_ratio, "update_ratio"),
        )

    def _number(self, leaf: Any, name: str) -> float | None:
        """One number, NaN and infinity included; anything but a number or None is left out."""
        value = _scalar(leaf)
        if value is None or value is True or value is False:
            if leaf is not None:
                self._leave_out(name, leaf)
            return None
        return value

    def _finite(self, leaf: Any, name: str) -> float | None:
        value = self._number(leaf, name)
        return value if value is not None and math.isfinite(value) else None

    # --- losses -----------------------------------------------------------------------------------------------------

    def _losses(self, node: Any) -> dict[str, float]:
        if type(node) not in (tuple, Named):
            total = _total_of_leaf(node)
            if total is not None:
                return {"total": total}
            self._leave_out("loss", node)
            return {}
        found = _Found({}, {})
        _walk(node, (), found)
        total_path = self._total_path(node, found)
        losses = self._total(node, found, total_path)
        for path, value in found.numbers.items():
            if path != total_path:
                self._add_part(losses, self._name(node, path), value)
        for path, leaf in found.others.items():
            if path != total_path and leaf is not None:
                self._leave_out(self._name(node, path), leaf)
        return losses

    def _total_path(self, root: Any, found: _Found) -> _Path | None:
        """Where the total is; the path of a dict stands for the sum of what is in it."""
        if self._loss.total is None:
            return _default_total(root, (), found)
        for name, child in _entries(root):
            if self._loss.total in (name, self._name(root, (name,))):
                return _default_total(child, (name,), found)
        for path in found.numbers:
            if self._name(root, path) == self._loss.total:
                return path
        names = ", ".join(self._name(root, path) for path in found.numbers)
        self._say(
            "no total",
            "the outputs have no loss named %r, which loss.total names; they have: %s",
            self._loss.total,
            names,
        )
        self.unknown += 1
        return None

    def _total(self, root: Any, found: _Found, path: _Path | None) -> dict[str, float]:
        if path is None:
            return {}
        if path in found.numbers:
            return {"total": found.numbers[path]}
        if path in found.others:
            total = _total_of_leaf(found.others[path])
            if total is None:
                self._leave_out(self._name(root, path), found.others[path])
            return {} if total is None else {"total": total}
        summed = {each: value for each, value in found.numbers.items() if each[: len(path)] == path}
        if not summed:
            return {}
        self._say(
            "sum",
            "no output is named loss or total: the total is the sum of %s; loss.total in the configuration chooses one",
            ", ".join(self._name(root, each) for each in summed),
        )
        return {
            "total": math.fsum(summed.values()) if all(map(math.isfinite, summed.values())) else sum(summed.values())
        }

    def _name(self, root: Any, path: _Path) -> str:
        """Name of a part: configured for the top of a tuple, else its keys and positions."""
        if not path:
            return "total"
        first = path[0]
        if type(root) is tuple and self._loss.names:
            first = self._configured_name(int(first), len(root))
        name = ".".join((first, *path[1:]))[:MAX_NAME]
        return name if name.isprintable() else "".join(c if c.isprintable() else "_" for c in name)

    def _configured_name(self, position: int, count: int) -> str:
        """`loss.names` names all elements of a tuple where there are enough, else the parts beside the total, in order."""
        names, total = self._loss.names, self._loss.total
        if len(names) < count:
            beside = int(total) if total is not None and total.isdecimal() else 0
            if position == beside:
                return str(position)
            index = position - (position > beside)
        else:
            index = position
        return names[index] if index < len(names) else str(position)

    def _add_part(self, losses: dict[str, float], name: str, value: float) -> None:
        if name in losses or name == "total":
            self._say(f"taken:{name}", "two losses are named %r: the second one is left out", name)
            self.unknown += 1
        else:
            losses[name] = value

    # --- what is not known ------------------------------------------------------------------------------------------

    def _leave_out(self, name: str, leaf: Any) -> None:
        self.unknown += 1
        key = f"left out: {name}"
        if key not in self._said:
            self._say(key, "the output %s (%s) is not a number of this step and is left out", name, _description(leaf))

    def _say(self, key: str, message: str, *arguments: object) -> None:
        if key not in self._said and len(self._said) < MAX_SAYINGS:
            self._said.add(key)
            log.warning("exporter: " + message, *arguments)


@dataclass(frozen=True, slots=True)
class _Found:
    """The leaves of outputs that are numbers, and those that are not, in order."""

    numbers: dict[_Path, float]
    others: dict[_Path, Any]


def _walk(node: Any, path: _Path, found: _Found) -> None:
    for name, child in _entries(node):
        below = (*path, name)
        if type(child) in (tuple, Named):
            _walk(child, below, found)
            continue
        value = _scalar(child)
        if value is None or value is True or value is False:
            found.others[below] = child
        else:
            found.numbers[below] = value


def _entries(node: Any) -> Iterator[tuple[str, Any]]:
    if type(node) is Named:
        return zip(map(str, node.names), node.values, strict=True)
    if type(node) is tuple:
        return ((str(position), value) for position, value in enumerate(node))
    return iter(())


def _default_total(node: Any, path: _Path, found: _Found) -> _Path | None:
    """Of a tuple element 0; of a dict `loss`, else `total`, else the only number, else the dict itself (its sum)."""
    if type(node) is tuple:
        return _default_total(node[0], (*path, "0"), found) if node else None
    if type(node) is not Named:
        return path
    children = dict(_entries(node))
    for name in ("loss", "total"):
        if name in children:
            return _default_total(children[name], (*path, name), found)
    below = [each for each in found.numbers if each[: len(path)] == path]
    return below[0] if len(below) == 1 else path


def _total_of_leaf(leaf: Any) -> float | None:
    """A loss as one number: itself, or the mean of a loss that was not reduced. A bool is no loss."""
    if type(leaf) in (Dropped, Live) or leaf is None:
        return None
    value = _scalar(leaf)
    if value is None:
        value = _mean(leaf)
    return None if value is True or value is False else value


def _is_bool(leaf: Any) -> bool:
    if type(leaf) is Live:
        return "bool" in str(getattr(leaf.value, "dtype", type(leaf.value))).lower()
    value = _scalar(leaf)
    return value is True or value is False


def _description(leaf: Any) -> str:
    if isinstance(leaf, Dropped):
        return f"{leaf.what} with {leaf.size} elements" if leaf.size else leaf.what
    if type(leaf) is Live:
        return "a Parameter, whose value changes later"
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else f"{type(leaf).__name__} of shape {tuple(shape)}"

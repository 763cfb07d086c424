"""The learning rate of the step just done, without running or compiling anything.

An optimiser's `get_lr()` compiles a graph at its first call (100 ms and more), runs an operator at each, and at the end
of a step gives the next step's rate. So the schedules that MindSpore and MindSpore Transformers bring are computed here,
in float32 and in the order of their own `construct`, and a rate that is a Parameter is read.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable
from ctypes import c_float
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

MAX_GROUPS = 8
"""Different rates that are exported; what is above is named once."""
MAX_WRAPPERS = 4
"""Optimisers inside optimisers (LARS, the fault-tolerance wrapper, AdaSum) that are looked through."""


class Single(float):
    """A float that each operation rounds to float32, as the device does."""

    __slots__ = ()

    def __new__(cls, value: float) -> Single:
        """Round `value` to float32; too large becomes infinity."""
        return super().__new__(cls, c_float(value).value)

    def __add__(self, other: float) -> Single:
        return Single(float.__add__(self, other))

    def __radd__(self, other: float) -> Single:
        return Single(float.__radd__(self, other))

    def __sub__(self, other: float) -> Single:
        return Single(float.__sub__(self, other))

    def __rsub__(self, other: float) -> Single:
        return Single(float.__rsub__(self, other))

    def __mul__(self, other: float) -> Single:
        return Single(float.__mul__(self, other))

    def __rmul__(self, other: float) -> Single:
        return Single(float.__rmul__(self, other))

    def __truediv__(self, other: float) -> Single:
        return Single(float.__truediv__(self, other))

    def __rtruediv__(self, other: float) -> Single:
        return Single(float.__rtruediv__(self, other))

    def __mod__(self, other: float) -> Single:
        return Single(float.__mod__(self, other))

    def __neg__(self) -> Single:
        return Single(float.__neg__(self))


PI, E = Single(math.pi), Single(math.e)


def _sin(x: Single) -> Single:
    return Single(math.sin(x))


def _cos(x: Single) -> Single:
    return Single(math.cos(x))


def _power(base: Single, exponent: Single) -> Single:
    return Single(math.pow(base, exponent))


def _floor(x: Single) -> Single:
    return Single(math.floor(x))


# Each formula takes the step and the schedule's own attributes, as float32, under their own names.

_Formula: TypeAlias = Callable[[Single, SimpleNamespace], Single]


# --- MindSpore's schedules: nn/learning_rate_schedule.py ----------------------------------------------------------------


def _cosine_decay(step: Single, s: SimpleNamespace) -> Single:
    return Single(s.min_lr + s.delta * (1.0 + _sin(PI * (min(step, s.decay_steps) / s.decay_steps + 0.5))))


def _polynomial_decay(step: Single, s: SimpleNamespace) -> Single:
    decay_steps = s.decay_steps
    if s.update_decay_steps:
        decay_steps *= max(math.ceil(step / decay_steps), 1)
    else:
        step = min(step, decay_steps)
    return Single(s.diff_learning_rate * _power(1.0 - step / decay_steps, s.power) + s.end_learning_rate)


def _warm_up(step: Single, s: SimpleNamespace) -> Single:
    return Single(s.learning_rate * (min(step, s.warmup_steps) / s.warmup_steps))


def _exponential_decay(step: Single, s: SimpleNamespace) -> Single:
    p = step / s.decay_steps
    return Single(s.learning_rate * _power(s.decay_rate, _floor(p) if s.is_stair else p))


def _natural_exponential_decay(step: Single, s: SimpleNamespace) -> Single:
    p = _floor(step / s.decay_steps) * s.decay_steps if s.is_stair else step
    return Single(s.learning_rate * _power(E, -s.decay_rate * p))


def _inverse_decay(step: Single, s: SimpleNamespace) -> Single:
    p = step / s.decay_steps
    return Single(s.learning_rate / (1.0 + s.decay_rate * (_floor(p) if s.is_stair else p)))


# --- MindSpore Transformers' schedules: core/lr/lr_schedule.py ----------------------------------------------------------


def _after_warm_up(formula: _Formula) -> _Formula:
    """The schedule with a linear warm-up before it."""

    def rate(step: Single, s: SimpleNamespace) -> Single:
        if step < s.warmup_steps:
            return Single(s.warmup_lr_init + (s.learning_rate - s.warmup_lr_init) * (step / s.warmup_steps))
        return formula(step, s)

    return rate


def _with_end(formula: _Formula) -> _Formula:
    """The schedule whose rate is `lr_end` from `decay_steps` on."""

    def rate(step: Single, s: SimpleNamespace) -> Single:
        return Single(s.lr_end) if step >= s.decay_steps else formula(step, s)

    return rate


def _cosine_share(angle: Single) -> Single:
    return max(Single(0.0), 0.5 * (1.0 + _cos(angle)))


def _constant(_: Single, s: SimpleNamespace) -> Single:
    return Single(s.learning_rate)


def _linear(step: Single, s: SimpleNamespace) -> Single:
    return Single(s.learning_rate * max(Single(0.0), (s.total_steps - step) / s.linear_steps))


def _cosine(step: Single, s: SimpleNamespace) -> Single:
    share = _cosine_share(PI * s.num_cycles * 2.0 * ((step - s.warmup_steps) / s.cosine_steps))
    return Single(s.lr_end + (s.learning_rate - s.lr_end) * share)


def _cosine_with_restarts(step: Single, s: SimpleNamespace) -> Single:
    progress = (step - s.warmup_steps) / s.cosine_steps
    if progress >= 1.0:
        return Single(0.0)
    return Single(s.lr_end + (s.learning_rate - s.lr_end) * _cosine_share(PI * ((s.num_cycles * progress) % 1.0)))


def _polynomial(step: Single, s: SimpleNamespace) -> Single:
    if step > s.total_steps:
        return Single(s.lr_end)
    remaining = 1.0 - (step - s.warmup_steps) / s.decay_steps
    decayed = (s.learning_rate - s.lr_end) * _power(remaining, s.power) + s.lr_end
    return Single(s.learning_rate * (decayed / s.learning_rate))


def _stable_then_linear(step: Single, s: SimpleNamespace) -> Single:
    if step < s.decay_start_steps:
        return Single(s.learning_rate * step / step)
    return Single(s.learning_rate - (s.learning_rate - s.lr_end) * ((step - s.decay_start_steps) / s.decay_steps))


def _cool_down(step: Single, s: SimpleNamespace) -> Single:
    decay_start = s.warmup_steps + s.keep_steps
    if step < decay_start:
        return Single(s.learning_rate)
    if step < decay_start + s.decay_steps:
        progress = (step - s.keep_steps - s.warmup_steps) / s.decay_steps
        return Single(s.lr_end1 + (s.learning_rate - s.lr_end1) * _cosine_share(PI * s.num_cycles * 2.0 * progress))
    return Single(s.lr_end1 if step < decay_start + s.decay_steps + s.final_steps else s.lr_end2)


def _cosine_annealing(step: Single, s: SimpleNamespace) -> Single:
    return Single(s.eta_min + (s.base_lr - s.eta_min) * _cosine_share(PI * step / s.t_max))


def _cosine_warm_restarts(step: Single, s: SimpleNamespace) -> Single:
    if step >= s.t_0 and s.t_mult != 1.0:
        raise ValueError("with t_mult above 1 the step of a restart hangs on how the device rounds a logarithm")
    since_restart = step - _floor(step / s.t_0) * s.t_0
    return Single(s.eta_min + (s.base_lr - s.eta_min) * _cosine_share(PI * since_restart / s.t_0))


_STAIRS = ("learning_rate", "decay_rate", "decay_steps", "is_stair")
_WARM_UP = ("learning_rate", "warmup_lr_init", "warmup_steps")
_COSINE = (*_WARM_UP, "cosine_steps", "decay_steps", "num_cycles", "lr_end")

_CLOSED_FORMS: dict[tuple[str, str], tuple[_Formula, tuple[str, ...]]] = {
    ("mindspore", "CosineDecayLR"): (_cosine_decay, ("min_lr", "delta", "decay_steps")),
    ("mindspore", "PolynomialDecayLR"): (
        _polynomial_decay,
        ("diff_learning_rate", "end_learning_rate", "decay_steps", "power", "update_decay_steps"),
    ),
    ("mindspore", "WarmUpLR"): (_warm_up, ("learning_rate", "warmup_steps")),
    ("mindspore", "ExponentialDecayLR"): (_exponential_decay, _STAIRS),
    ("mindspore", "NaturalExpDecayLR"): (_natural_exponential_decay, _STAIRS),
    ("mindspore", "InverseDecayLR"): (_inverse_decay, _STAIRS),
    ("mindformers", "ConstantWarmUpLR"): (_after_warm_up(_constant), _WARM_UP),
    ("mindformers", "LinearWithWarmUpLR"): (_after_warm_up(_linear), (*_WARM_UP, "total_steps", "linear_steps")),
    ("mindformers", "CosineWithWarmUpLR"): (_with_end(_after_warm_up(_cosine)), _COSINE),
    ("mindformers", "CosineWithRestartsAndWarmUpLR"): (_with_end(_after_warm_up(_cosine_with_restarts)), _COSINE),
    ("mindformers", "PolynomialWithWarmUpLR"): (
        _after_warm_up(_polynomial),
        (*_WARM_UP, "total_steps", "decay_steps", "power", "lr_end"),
    ),
    ("mindformers", "WarmUpStableDecayLR"): (
        _after_warm_up(_stable_then_linear),
        (*_WARM_UP, "decay_start_steps", "decay_steps", "lr_end"),
    ),
    ("mindformers", "ConstantWithCoolDownLR"): (
        _after_warm_up(_cool_down),
        (*_WARM_UP, "keep_steps", "decay_steps", "final_steps", "num_cycles", "lr_end1", "lr_end2"),
    ),
    ("mindformers", "CosineAnnealingLR"): (_cosine_annealing, ("base_lr", "t_max", "eta_min")),
    ("mindformers", "CosineAnnealingWarmRestarts"): (_cosine_warm_restarts, ("base_lr", "t_0", "t_mult", "eta_min")),
}
"""By package and class: the formula and the attributes it takes."""


# --- one rate each ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ClosedForm:
    formula: _Formula
    attributes: SimpleNamespace

    def at(self, step: int) -> float:
        return float(self.formula(Single(step), self.attributes))


@dataclass(frozen=True, slots=True)
class _Table:
    """A list of rates; `packed` is the list in float32."""

    packed: bytes

    def at(self, step: int) -> float:
        if 4 * step >= len(self.packed):
            # The CPU raises there, an accelerator reads whatever lies behind the table.
            raise ValueError(
                f"the list of rates has {len(self.packed) // 4} entries and the optimiser is at step {step}"
            )
        return float(struct.unpack_from("f", self.packed, 4 * step)[0])


@dataclass(frozen=True, slots=True)
class _Scaled:
    base: _Rate
    scale: Single

    def at(self, step: int) -> float:
        return float(self.scale * Single(self.base.at(step)))


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A Parameter: it may be assigned at any time. `in_schedules`: an optimiser that has schedules beside it computes with
    `parameter + 1.0 - 1.0`, and a small rate really becomes another one."""

    parameter: Any
    in_schedules: bool

    def at(self, _: int) -> float:
        value = Single(self.parameter.item())
        return float(value + 1.0 - 1.0 if self.in_schedules else value)


_Rate: TypeAlias = "_ClosedForm | _Table | _Scaled | _Held"


class UnknownScheduleError(Exception):
    """A rate that cannot be known without running operators; the message says why. Never leaves this module."""


def _rate_of(source: Any) -> _Rate:
    """Raises UnknownScheduleError."""
    if _is_parameter(source):
        return _Held(source, in_schedules=False)
    package, name = _owner_of_construct(source)
    if (package, name) == ("mindspore", "_ConvertToCell"):
        return _Held(source.learning_rate, in_schedules=True)
    if (package, name) == ("mindspore", "_IteratorLearningRate"):
        return _Table(source.learning_rate.asnumpy().astype("float32").tobytes())
    if (package, name) == ("mindformers", "LearningRateWiseLayer"):
        return _Scaled(_rate_of(source.base_lr), Single(_number(source.lr_scale)))
    if (package, name) not in _CLOSED_FORMS:
        raise UnknownScheduleError(
            f"{type(source).__name__} is a schedule of your own; evaluating it would run operators beside the training"
        )
    formula, attributes = _CLOSED_FORMS[package, name]
    return _ClosedForm(
        formula, SimpleNamespace(**{each: Single(_number(getattr(source, each))) for each in attributes})
    )


def _is_parameter(source: Any) -> bool:
    return hasattr(source, "asnumpy") and hasattr(source, "item")


def _owner_of_construct(source: Any) -> tuple[str, str]:
    """Package and name of the class whose `construct` computes the rate: one derived from a known schedule without
    overriding it is computed alike, one that overrides it is not known."""
    for base in type(source).__mro__:
        if "construct" in vars(base):
            return base.__module__.partition(".")[0], base.__name__
    return "", type(source).__name__


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


# --- the optimiser ------------------------------------------------------------------------------------------------------


class LearningRates:
    """The learning rates of an optimiser, one for each distinct schedule of its groups.

    Made on the training thread when the training begins: reads Python numbers, constants and tables, runs nothing. What
    cannot be known is said once in the log, and all rates are then absent, because a group's index must stay its own.

    `changes_by_schedule`: ask `at` with the optimiser's step number, else `read_live`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = _inner(optimizer)
        self._rates: tuple[_Rate, ...] = ()
        self._said = False
        self.changes_by_schedule = True
        try:
            self._rates = _distinct_rates(self._optimizer)
            self.changes_by_schedule = not all(isinstance(rate, _Held) for rate in self._rates)
        except UnknownScheduleError as reason:
            self._say(str(reason))
        except Exception as error:
            self._say(f"{type(self._optimizer).__name__} cannot be understood: {error!r}")

    def at(self, schedule_step: int) -> tuple[float, ...] | None:
        """Rates used by the step with this 0-based number of the optimiser, None where they cannot be known.

        Called in the worker: a group whose rate is a Parameter is read, which waits for the device.
        """
        if not self._rates or schedule_step < 0:
            return None
        try:
            rates = tuple([rate.at(schedule_step) for rate in self._rates])
        except (ArithmeticError, ValueError) as reason:
            self._say(str(reason))
            return None
        return rates if all(map(math.isfinite, rates)) else None

    def read_live(self) -> tuple[float, ...]:
        """Rates that are Parameters, as they are now; empty where there is a schedule. Waits for the device."""
        if self.changes_by_schedule:
            return ()
        return self.at(0) or ()

    def steps_done(self) -> int | None:
        """The optimiser's own step number: the `schedule_step` of the next step. Waits for the device; for the begin."""
        try:
            return int(self._optimizer.global_step.item())
        except Exception:
            return None

    def _say(self, reason: str) -> None:
        if not self._said:
            self._said = True
            log.warning("exporter: the learning rate is not exported: %s", reason)


def needs_hook_read(optimizer: Any, callbacks: Iterable[Any]) -> bool:
    """Whether the rate must be read at the begin of each step, by `read_live` on the training thread.

    True with MindSpore's `LearningRateScheduler` (or one derived from it), which assigns the rate after each step: later
    the finished step's rate is gone. It reads the Parameter itself at the end of each step, so one more read makes the
    device wait for nothing new.
    """
    schedules = any(
        base.__name__ == "LearningRateScheduler" for callback in callbacks for base in type(callback).__mro__
    )
    return schedules and _is_parameter(getattr(_inner(optimizer), "learning_rate", None))


def _inner(optimizer: Any) -> Any:
    """The optimiser that has the rate: a wrapper's own `learning_rate` is a dummy (LARS) or missing (AdaSum)."""
    for _ in range(MAX_WRAPPERS):
        candidates = [getattr(optimizer, name, None) for name in ("opt", "optimizer")]
        inner = [each for each in candidates if hasattr(each, "get_lr")]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def _distinct_rates(optimizer: Any) -> tuple[_Rate, ...]:
    """One rate for each distinct schedule, in the order of the groups. Raises UnknownScheduleError."""
    if getattr(optimizer, "relative_step", False) and getattr(optimizer, "scale_lr", True):
        raise UnknownScheduleError(f"{type(optimizer).__name__} with relative_step makes its own rate in each step")
    source = getattr(optimizer, "learning_rate", None)
    if source is None:
        raise UnknownScheduleError(f"{type(optimizer).__name__} has no learning_rate")
    sources = list(source) if getattr(optimizer, "is_group_lr", False) else [source]
    rates: list[_Rate] = []
    # The optimiser keeps one entry a parameter; a group's entries are one object.
    for each in {id(each): each for each in sources}.values():
        rate = _rate_of(each)
        if rate not in rates:
            rates.append(rate)
    if len(rates) > MAX_GROUPS:
        log.warning("exporter: the optimiser has %d learning rates, the first %d are exported", len(rates), MAX_GROUPS)
    return tuple(rates[:MAX_GROUPS])

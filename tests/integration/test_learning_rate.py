"""The learning rate of the step just done, against MindSpore's own `get_lr()` taken before each step of a real training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, LearningRateScheduler, Model

from mindspore_exporter.learning_rate import LearningRates, needs_hook_read

pytestmark = pytest.mark.mindspore

STEPS = 6
MODES = [pytest.param(ms.GRAPH_MODE, id="graph"), pytest.param(ms.PYNATIVE_MODE, id="pynative")]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    ms.set_context(mode=request.param, device_target="CPU")
    yield request.param
    ms.set_context(mode=ms.GRAPH_MODE)


class OwnSchedule(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, global_step: Any) -> Any:
        return 0.1 / (1.0 + global_step)


class OverridingSchedule(nn.WarmUpLR):
    def construct(self, global_step: Any) -> Any:
        return 2.0 * super().construct(global_step)


class RenamedSchedule(nn.WarmUpLR):
    """Computes as WarmUpLR does."""


class LearningRatesBefore(Callback):
    """Notes the optimiser's own word before each step, and ours after it (of the step just done)."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.rates: LearningRates | None = None
        self.theirs: list[tuple[float, ...]] = []
        self.ours: list[tuple[float, ...] | None] = []
        self.first_step: int | None = None

    def on_train_begin(self, run_context: Any) -> None:
        self.rates = LearningRates(self.optimizer)
        self.first_step = self.rates.steps_done()

    def on_train_step_begin(self, run_context: Any) -> None:
        rate = self.optimizer.get_lr()
        rates = rate if isinstance(rate, (tuple, list)) else [rate]
        self.theirs.append(tuple(float(each.asnumpy()) for each in rates))

    def on_train_step_end(self, run_context: Any) -> None:
        assert self.rates is not None
        assert self.first_step is not None
        self.ours.append(
            in_a_worker(lambda: self.rates.at(self.first_step + run_context.original_args().cur_step_num - 1))
        )


def in_a_worker(read: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def groups(network: Any, *rates: Any) -> list[dict[str, Any]]:
    """One group a parameter; None: the optimiser's own rate."""
    return [
        {"params": [parameter]} if rate is None else {"params": [parameter], "lr": rate}
        for parameter, rate in zip(network.trainable_params(), rates, strict=True)
    ]


def train(network: Any, optimizer: Any, callbacks: Sequence[Any], steps: int = STEPS) -> None:
    data = ms.dataset.NumpySlicesDataset(
        (np.ones((steps, 2), np.float32), np.zeros((steps, 1), np.float32)), ["x", "y"], shuffle=False
    ).batch(1)
    Model(network, nn.MSELoss(), optimizer).train(1, data, callbacks=list(callbacks), dataset_sink_mode=False)


def close(ours: tuple[float, ...] | None, theirs: tuple[float, ...], peak: float) -> bool:
    """To float32 precision of the schedule's own numbers: near the end of a cosine its terms cancel out."""
    return ours is not None and len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=1e-6, atol=1e-7 * peak)


SINGLE_RATES: dict[str, Callable[[], Any]] = {
    "float": lambda: 0.05,
    "tensor": lambda: ms.Tensor(0.05, ms.float32),
    "list": lambda: nn.exponential_decay_lr(0.1, 0.7, STEPS, 2, 1),
    "tensor table": lambda: ms.Tensor(np.linspace(0.1, 0.01, STEPS), ms.float32),
    "cosine": lambda: nn.CosineDecayLR(0.001, 0.1, 4),
    "cosine to zero": lambda: nn.CosineDecayLR(0.0, 0.1, 4),
    "polynomial": lambda: nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5),
    "polynomial in cycles": lambda: nn.PolynomialDecayLR(0.1, 0.01, 2, 2.0, True),
    "warm-up": lambda: nn.WarmUpLR(0.1, 4),
    "exponential": lambda: nn.ExponentialDecayLR(0.1, 0.7, 3),
    "exponential in stairs": lambda: nn.ExponentialDecayLR(0.1, 0.7, 3, True),
    "natural exponential": lambda: nn.NaturalExpDecayLR(0.1, 0.3, 2),
    "natural exponential in stairs": lambda: nn.NaturalExpDecayLR(0.1, 0.3, 2, True),
    "inverse": lambda: nn.InverseDecayLR(0.1, 0.5, 3),
    "inverse in stairs": lambda: nn.InverseDecayLR(0.1, 0.5, 3, True),
    "derived, not overridden": lambda: RenamedSchedule(0.1, 4),
}


@pytest.mark.parametrize("kind", SINGLE_RATES)
def test_the_rate_of_each_step_is_the_one_that_the_optimiser_used(mode: int, kind: str) -> None:
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params(), SINGLE_RATES[kind]())
    monitor = LearningRatesBefore(optimizer)
    train(network, optimizer, [monitor])
    assert len(monitor.theirs) == STEPS
    assert all(close(ours, theirs, 0.1) for ours, theirs in zip(monitor.ours, monitor.theirs, strict=True)), (
        monitor.ours,
        monitor.theirs,
    )


GROUPED_RATES: dict[str, tuple[Callable[[], Sequence[Any]], Any]] = {
    "floats": (lambda: (0.05, 0.01), 0.1),
    "float and default": (lambda: (0.05, None), 0.1),
    "schedules": (lambda: (nn.CosineDecayLR(0.001, 0.1, 4), nn.WarmUpLR(0.2, 3)), 0.1),
    "schedule and small float": (lambda: (1e-5, nn.WarmUpLR(0.2, 3)), 0.1),
    "lists": (lambda: ([0.1] * STEPS, list(np.linspace(0.2, 0.1, STEPS))), 0.1),
}


@pytest.mark.parametrize("kind", GROUPED_RATES)
def test_each_group_has_its_own_rate(mode: int, kind: str) -> None:
    network = nn.Dense(2, 1)
    rates, default = GROUPED_RATES[kind]
    optimizer = nn.SGD(groups(network, *rates()), default)
    monitor = LearningRatesBefore(optimizer)
    train(network, optimizer, [monitor])
    assert all(close(ours, theirs, 0.2) for ours, theirs in zip(monitor.ours, monitor.theirs, strict=True)), (
        monitor.ours,
        monitor.theirs,
    )


def test_parameters_of_one_schedule_are_one_group() -> None:
    layers = nn.SequentialCell(*[nn.Dense(2, 2) for _ in range(20)])
    weights = [each for each in layers.trainable_params() if "weight" in each.name]
    biases = [each for each in layers.trainable_params() if "bias" in each.name]
    decayed = [{"params": weights, "lr": nn.WarmUpLR(0.1, 4)}, {"params": biases, "lr": nn.WarmUpLR(0.1, 4)}]
    assert LearningRates(nn.Momentum(decayed, 0.1, 0.9)).at(2) == (pytest.approx(0.05),)


def test_at_most_eight_rates_are_given(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.SequentialCell(*[nn.Dense(2, 2) for _ in range(10)])
    each_its_own = [{"params": [each], "lr": 0.01 * n} for n, each in enumerate(layers.trainable_params(), 1)]
    rates = LearningRates(nn.SGD(each_its_own, 0.1)).read_live()
    assert rates == pytest.approx([0.01 * n for n in range(1, 9)])
    assert "20 learning rates" in caplog.text


@pytest.mark.parametrize("schedule", [OwnSchedule, lambda: OverridingSchedule(0.1, 4)], ids=["own", "overriding"])
def test_a_schedule_that_nobody_knows_is_absent_and_said_once(schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    rates = LearningRates(nn.SGD(nn.Dense(2, 1).trainable_params(), schedule()))
    assert [rates.at(step) for step in range(3)] == [None] * 3
    assert rates.read_live() == ()
    assert len(caplog.records) == 1
    assert "Schedule is a schedule of your own" in caplog.text


def test_one_unknown_schedule_among_groups_leaves_all_absent_so_that_no_index_shifts() -> None:
    network = nn.Dense(2, 1)
    assert LearningRates(nn.SGD(groups(network, OwnSchedule(), 0.1), 0.1)).at(0) is None


def test_behind_the_end_of_a_list_the_rate_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    rates = LearningRates(nn.SGD(nn.Dense(2, 1).trainable_params(), [0.1, 0.2]))
    assert rates.at(1) == pytest.approx((0.2,))
    assert rates.at(2) is None
    assert "has 2 entries and the optimiser is at step 2" in caplog.text


def test_a_rate_that_the_optimiser_makes_itself_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    assert LearningRates(nn.AdaFactor(nn.Dense(2, 1).trainable_params())).at(0) is None
    assert "relative_step" in caplog.text


def test_an_object_that_is_no_optimiser_is_absent() -> None:
    assert LearningRates(object()).at(0) is None
    assert LearningRates(object()).steps_done() is None


def test_the_rate_of_a_wrapped_optimiser_is_the_inner_ones() -> None:
    inner = nn.Momentum(nn.Dense(2, 1).trainable_params(), nn.WarmUpLR(0.1, 4), 0.9)
    assert LearningRates(nn.LARS(inner)).at(2) == pytest.approx((0.05,))


def test_a_float_rate_is_read_live_and_a_schedule_is_not() -> None:
    parameters = nn.Dense(2, 1).trainable_params()
    assert LearningRates(nn.SGD(parameters, 0.05)).read_live() == pytest.approx((0.05,))
    assert not LearningRates(nn.SGD(parameters, 0.05)).changes_by_schedule
    assert LearningRates(nn.SGD(parameters, nn.WarmUpLR(0.1, 4))).read_live() == ()
    assert LearningRates(nn.SGD(parameters, nn.WarmUpLR(0.1, 4))).changes_by_schedule


def test_nothing_is_run_or_compiled_at_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = nn.CosineDecayLR(0.001, 0.1, 4)
    optimizer = nn.SGD(nn.Dense(2, 1).trainable_params(), schedule)
    monkeypatch.setattr(nn.Cell, "__call__", lambda *_: pytest.fail("a cell was called"))
    assert LearningRates(optimizer).at(0) == pytest.approx((0.1,))


class RatesAtStepBegin(Callback):
    """What our hook does where a LearningRateScheduler assigns the rate: read at the begin, tell at the end."""

    def __init__(self, optimizer: Any) -> None:
        self.rates = LearningRates(optimizer)
        self.read: list[float] = []

    def on_train_step_begin(self, run_context: Any) -> None:
        self.read.extend(self.rates.read_live())


def test_with_a_scheduler_callback_the_rate_is_the_one_held_when_the_step_began(mode: int) -> None:
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    assigned = [0.1 * 0.5**n for n in range(1, STEPS + 1)]
    scheduler = LearningRateScheduler(lambda rate, step: assigned[step - 1])
    monitor = RatesAtStepBegin(optimizer)
    assert needs_hook_read(optimizer, [monitor, scheduler])
    train(network, optimizer, [monitor, scheduler])
    assert monitor.read == pytest.approx([0.1, *assigned[:-1]])


def test_the_hook_reads_only_where_a_scheduler_callback_assigns_a_parameter() -> None:
    parameters = nn.Dense(2, 1).trainable_params()
    scheduler = LearningRateScheduler(lambda rate, step: rate)
    assert not needs_hook_read(nn.SGD(parameters, 0.1), [])
    assert not needs_hook_read(nn.SGD(parameters, nn.WarmUpLR(0.1, 4)), [scheduler])
    assert not needs_hook_read(None, [scheduler])


def test_a_resumed_optimiser_goes_on_at_its_own_step(mode: int) -> None:
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params(), nn.CosineDecayLR(0.001, 0.1, 20))
    train(network, optimizer, [])
    monitor = LearningRatesBefore(optimizer)
    train(network, optimizer, [monitor], steps=3)
    assert monitor.first_step == STEPS
    assert all(close(ours, theirs, 0.1) for ours, theirs in zip(monitor.ours, monitor.theirs, strict=True))


# --- MindSpore Transformers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its schedules; the import takes seconds and opens log files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_DEFAULT_PATH", str(tmp_path_factory.mktemp("mindformers")))
        from mindformers.core import lr

        yield lr


TRANSFORMERS_RATES: dict[str, dict[str, Any]] = {
    "ConstantWarmUpLR": {"learning_rate": 0.1, "warmup_steps": 4, "warmup_lr_init": 0.01},
    "LinearWithWarmUpLR": {"learning_rate": 0.1, "total_steps": 10, "warmup_steps": 3},
    "CosineWithWarmUpLR": {"learning_rate": 0.1, "total_steps": 10, "warmup_steps": 3, "lr_end": 0.001},
    "CosineWithRestartsAndWarmUpLR": {"learning_rate": 0.1, "total_steps": 12, "warmup_steps": 2, "num_cycles": 2.5},
    "PolynomialWithWarmUpLR": {"learning_rate": 0.1, "total_steps": 10, "warmup_steps": 3, "power": 2.0},
    "WarmUpStableDecayLR": {"learning_rate": 0.1, "total_steps": 11, "warmup_steps": 3, "decay_start_steps": 6},
    "ConstantWithCoolDownLR": {
        "learning_rate": 0.1,
        "warmup_steps": 2,
        "keep_steps": 2,
        "decay_steps": 5,
        "final_steps": 2,
        "lr_end1": 0.02,
        "lr_end2": 0.01,
    },
    "CosineAnnealingLR": {"base_lr": 0.1, "t_max": 5, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"base_lr": 0.1, "t_0": 4, "eta_min": 0.001},
}


def their_rates(schedule: Any, steps: int) -> list[float]:
    return [float(schedule(ms.Tensor([step], ms.int32)).asnumpy().reshape(-1)[0]) for step in range(steps)]


@pytest.mark.mindformers
@pytest.mark.parametrize("name", TRANSFORMERS_RATES)
def test_the_schedules_of_mindspore_transformers_are_known(lr: Any, name: str) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    schedule = getattr(lr, name)(**TRANSFORMERS_RATES[name])
    rates = LearningRates(nn.SGD(nn.Dense(2, 1).trainable_params(), schedule))
    ours = [rates.at(step) for step in range(14)]
    assert all(close(our, (their,), 0.1) for our, their in zip(ours, their_rates(schedule, 14), strict=True)), ours


@pytest.mark.mindformers
def test_a_layers_rate_is_its_base_scaled(lr: Any) -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    schedule = lr.LearningRateWiseLayer(lr.LinearWithWarmUpLR(learning_rate=0.1, total_steps=10, warmup_steps=3), 0.25)
    rates = LearningRates(nn.SGD(nn.Dense(2, 1).trainable_params(), schedule))
    assert [rates.at(step) for step in range(10)] == [
        pytest.approx((each,), 1e-6) for each in their_rates(schedule, 10)
    ]


@pytest.mark.mindformers
def test_restarts_of_growing_length_are_absent_after_the_first(lr: Any, caplog: pytest.LogCaptureFixture) -> None:
    schedule = lr.CosineAnnealingWarmRestarts(base_lr=0.1, t_0=4, t_mult=2)
    rates = LearningRates(nn.SGD(nn.Dense(2, 1).trainable_params(), schedule))
    assert rates.at(0) == pytest.approx((0.1,))
    assert rates.at(4) is None
    assert "t_mult above 1" in caplog.text

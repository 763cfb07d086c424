"""Outputs of real trainings, held in the hook and read in another thread, against what the run's own monitors read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.train import Callback, FixedLossScaleManager, Model

from mindspore_exporter.config import LossConfig
from mindspore_exporter.decode import Decoded, Decoder, Live, freeze, read_now, retain

pytestmark = pytest.mark.mindspore

STEPS = 4


@pytest.fixture(params=[pytest.param(ms.GRAPH_MODE, id="graph"), pytest.param(ms.PYNATIVE_MODE, id="pynative")])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    ms.set_context(mode=request.param, device_target="CPU")
    yield request.param
    ms.set_context(mode=ms.GRAPH_MODE)


class Held(Callback):
    """Does in each step what our hook does; `own` is what the run's monitors would read of the loss."""

    def __init__(self, loss_of: Callable[[Any], Any] = lambda outputs: outputs) -> None:
        self.loss_of = loss_of
        self.retained: list[Any] = []
        self.immediate: list[tuple[float, ...]] = []
        self.own: list[float] = []
        self.outputs: list[Any] = []
        self.train_cell: tuple[str, ...] = ()

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        outputs = params.net_outputs
        self.train_cell = tuple(kind.__name__ for kind in type(params.train_network).__mro__)
        self.retained.append(retain(outputs))
        self.immediate.append(read_now(self.retained[-1]))
        self.own.append(float(np.mean(self.loss_of(outputs).asnumpy().astype(np.float32))))
        self.outputs.append(outputs)

    def decoded(self) -> list[Decoded]:
        """All records, read after the training, in another thread."""
        decoder, found = Decoder(self.train_cell, LossConfig()), []
        thread = threading.Thread(target=lambda: found.extend(map(decoder.decode, self.retained)))
        thread.start()
        thread.join()
        assert decoder.unknown == 0
        return found

    def totals(self) -> list[float]:
        return [decoded.losses["total"] for decoded in self.decoded()]


def train(model: Any, held: Held, steps: int = STEPS) -> None:
    random = np.random.default_rng(1)
    rows = (
        random.normal(size=(4 * steps, 3)).astype(np.float32),
        random.normal(size=(4 * steps, 1)).astype(np.float32),
    )
    data = ms.dataset.NumpySlicesDataset(rows, ["x", "y"], shuffle=False).batch(4)
    model.train(1, data, callbacks=[held], dataset_sink_mode=False)


def optimizer_of(network: Any, **arguments: Any) -> Any:
    return nn.Momentum(network.trainable_params(), 0.01, 0.9, **arguments)


def run(cell: type[nn.TrainOneStepCell], held: Held, steps: int = STEPS, **arguments: Any) -> Held:
    """Train with a train cell of one's own, as `Model(train_cell)` does."""
    network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss())
    train(Model(cell(network, optimizer_of(network), **arguments)), held, steps)
    return held


# --- one loss -----------------------------------------------------------------------------------------------------------


def test_the_loss_of_each_step_is_the_runs_own(mode: int) -> None:
    network, held = nn.Dense(3, 1), Held()
    train(Model(network, nn.MSELoss(), optimizer_of(network)), held)
    assert held.totals() == held.own
    assert len(set(held.own)) == STEPS


def test_a_loss_that_was_not_reduced_is_the_mean_that_lossmonitor_prints(mode: int) -> None:
    network, held = nn.Dense(3, 1), Held()
    train(Model(network, nn.MSELoss(reduction="none"), optimizer_of(network)), held)
    assert held.outputs[0].shape == (4, 1)
    assert held.totals() == held.own


def test_a_fixed_loss_scale_without_overflow_handling_gives_the_unscaled_loss(mode: int) -> None:
    network, held = nn.Dense(3, 1), Held()
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    train(Model(network, nn.MSELoss(), optimizer_of(network, loss_scale=1024.0), loss_scale_manager=manager), held)
    assert held.totals() == held.own
    assert held.own[0] < 100


class CastLoss(nn.TrainOneStepCell):
    def __init__(self, network: Any, optimizer: Any, dtype: Any) -> None:
        super().__init__(network, optimizer)
        self.dtype = dtype

    def construct(self, *inputs: Any) -> Any:
        return ops.cast(super().construct(*inputs), self.dtype)


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=["float16", "bfloat16"])
def test_a_half_precision_loss_is_read_exactly(mode: int, dtype: Any) -> None:
    held = run(CastLoss, Held(), dtype=dtype)
    assert held.outputs[0].dtype == dtype
    assert held.totals() == held.own


# --- several losses -----------------------------------------------------------------------------------------------------


class Detector(nn.TrainOneStepCell):
    def construct(self, *inputs: Any) -> Any:
        loss = super().construct(*inputs)
        return loss, loss * 0.5, loss * 0.25, loss * 0.125


class NamedLosses(nn.TrainOneStepCell):
    def construct(self, *inputs: Any) -> Any:
        loss = super().construct(*inputs)
        return {"cls": loss * 0.5, "loss": loss}


class NestedLosses(nn.TrainOneStepCell):
    def construct(self, *inputs: Any) -> Any:
        loss = super().construct(*inputs)
        return loss, {"rpn": (loss * 0.5, 2.0), "none": None}, [loss * 0.25]


def test_a_detectors_losses_are_losses(mode: int) -> None:
    held = run(Detector, Held(lambda outputs: outputs[0]))
    assert held.decoded() == [Decoded({"total": own, "1": own / 2, "2": own / 4, "3": own / 8}) for own in held.own]


def test_a_dict_names_its_losses(mode: int) -> None:
    held = run(NamedLosses, Held(lambda outputs: outputs["loss"]))
    assert held.decoded() == [Decoded({"total": own, "cls": own / 2}) for own in held.own]


def test_nested_losses_are_named_by_their_path(mode: int) -> None:
    held = run(NestedLosses, Held(lambda outputs: outputs[0]))
    expected = [Decoded({"total": own, "1.rpn.0": own / 2, "1.rpn.1": 2.0, "2.0": own / 4}) for own in held.own]
    assert held.decoded() == expected


def test_returned_gradients_are_no_losses(mode: int) -> None:
    held = run(nn.TrainOneStepCell, Held(lambda outputs: outputs[0]), return_grad=True)
    assert isinstance(held.outputs[0][1], dict)
    assert held.decoded() == [Decoded({"total": own}) for own in held.own]


# --- loss-scaled cells --------------------------------------------------------------------------------------------------


class MFTrainOneStepCell(nn.TrainOneStepCell):
    """Returns what MindSpore Transformers' cell of this name returns; its own overflow check does not run on the CPU."""

    def __init__(self, network: Any, optimizer: Any, norm: bool = True, local: bool = False) -> None:
        super().__init__(network, optimizer)
        self.scale_sense = ms.Parameter(ms.Tensor(1024.0, ms.float32), name="scale_sense")
        self.norm = norm
        self.local = local

    def construct(self, *inputs: Any) -> Any:
        loss = self._no_sens_impl(*inputs)
        scale = ops.assign(self.scale_sense, self.scale_sense * 0.5)
        norm = ops.reshape(loss * 3.0, (1,)) if self.norm else None
        outputs = (ops.reshape(loss, (1,)), loss > 1.0, ops.depend(self.scale_sense, scale), loss * 0.001, norm)
        if self.local:
            return (*outputs, ops.ones((6,), ms.float32), (3, 3))
        return outputs


class CpuMFTrainOneStepCell(MFTrainOneStepCell):
    """Recognised by the class it derives from."""


@pytest.fixture(scope="module")
def their_reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], tuple[Any, ...]]]:
    """How MFLossMonitor reads the same outputs; the import takes seconds and opens log files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_DEFAULT_PATH", str(tmp_path_factory.mktemp("mindformers")))
        from mindformers.core.callback.callback import _get_loss_output

        yield _get_loss_output


@pytest.mark.parametrize("cell", [MFTrainOneStepCell, CpuMFTrainOneStepCell])
@pytest.mark.parametrize(
    "arguments", [{}, {"norm": False}, {"local": True}], ids=["clipped", "not clipped", "local norm"]
)
def test_outputs_of_transformers_cells_are_read_as_their_monitor_reads_them(
    mode: int, cell: Any, arguments: dict[str, bool], their_reading: Callable[[Any], tuple[Any, ...]]
) -> None:
    theirs: list[tuple[Any, ...]] = []

    def read(outputs: Any) -> Any:
        loss, overflow, _, rate, norm = their_reading(outputs)
        theirs.append((float(loss), bool(overflow), float(rate), None if norm is None else float(norm[0])))
        return outputs[0]

    held = run(cell, Held(read), **arguments)
    assert [
        (*each.losses.values(), each.overflow, *(each.learning_rates or ()), each.gradient_norm)
        for each in held.decoded()
    ] == theirs


def test_the_loss_scale_is_the_steps_own_or_where_it_is_a_parameter_the_present_one(mode: int) -> None:
    held = run(MFTrainOneStepCell, Held(lambda outputs: outputs[0]))
    scales = [each.loss_scale for each in held.decoded()]
    live = isinstance(held.retained[0][2], Live)
    assert scales == ([1024.0 * 0.5**STEPS] * STEPS if live else [1024.0 * 0.5**step for step in range(1, STEPS + 1)])


# --- where and when it is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [nn.TrainOneStepCell, Detector, MFTrainOneStepCell])
def test_a_late_read_in_another_thread_equals_the_read_at_once(mode: int, cell: Any) -> None:
    held = run(cell, Held(lambda outputs: outputs[0] if isinstance(outputs, tuple) else outputs), steps=20)
    found: list[bool] = []
    decoder = Decoder(held.train_cell, LossConfig())
    pairs = list(zip(held.retained, held.immediate, strict=True))
    thread = threading.Thread(target=lambda: found.extend(decoder.compare(*pair) for pair in pairs))
    thread.start()
    thread.join()
    assert found == [True] * 20
    assert len(set(held.immediate)) == 20


@pytest.mark.parametrize("cell", [nn.TrainOneStepCell, NestedLosses, MFTrainOneStepCell])
def test_what_the_hook_froze_decodes_alike(mode: int, cell: Any) -> None:
    held = run(cell, Held(lambda outputs: outputs[0] if isinstance(outputs, tuple) else outputs))
    decoder = Decoder(held.train_cell, LossConfig())
    assert [decoder.decode(freeze(each)) for each in held.retained] == [decoder.decode(each) for each in held.retained]


def test_holding_outputs_converts_no_tensor(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = ops.add(ms.Tensor(1.0), 1.0)
    parameter = ms.Parameter(ms.Tensor(1.0), name="p")
    for name in ("asnumpy", "item", "__float__", "__bool__"):
        monkeypatch.setattr(ms.Tensor, name, lambda *_: pytest.fail("a tensor was converted"))
    held = retain((loss, {"part": loss}, [parameter]))
    assert held[0] is loss
    assert isinstance(held[2][0], Live)

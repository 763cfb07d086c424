"""`Decoder`, in the worker: which output is which number."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspore_exporter.config import LossConfig
from mindspore_exporter.decode import Decoded, Decoder, freeze, read_now, retain
from mindspore_exporter.records import RecordedValues

SCALED = ("TrainOneStepWithLossScaleCell", "TrainOneStepCell", "Cell")
TRANSFORMERS = ("MFTrainOneStepCell", *SCALED)
PLAIN = ("TrainOneStepCell", "Cell")
OWN = ("MyTrainCell", "Cell")


class StubTensor:
    """Has what a MindSpore tensor has; its value may be changed later."""

    def __init__(self, value: Any, dtype: Any = np.float32) -> None:
        self.array = np.array(value, dtype=dtype)

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    def item(self) -> Any:
        return self.array.item()

    def asnumpy(self) -> Any:
        return self.array


Parameter = type("Parameter", (StubTensor,), {"__module__": "mindspore.common.parameter"})


def decode(outputs: Any, cell: tuple[str, ...] = OWN, **loss: Any) -> Decoded:
    return Decoder(cell, LossConfig(**loss)).decode(retain(outputs))


def losses(outputs: Any, cell: tuple[str, ...] = OWN, **loss: Any) -> dict[str, float]:
    return dict(decode(outputs, cell, **loss).losses)


# --- plain losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outputs",
    [
        StubTensor(2.5),
        StubTensor([2.5]),
        StubTensor([[2.5]]),
        StubTensor(2.5, np.float16),
        np.float32(2.5),
        np.array([2.5]),
        2.5,
        (StubTensor(2.5),),
        [2.5],
        {"loss": StubTensor(2.5)},
        {"anything": 2.5},
    ],
)
def test_a_single_number_is_the_total_alone(outputs: Any) -> None:
    assert decode(outputs) == Decoded({"total": 2.5})


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_comes_through(value: float) -> None:
    assert losses(StubTensor(value)) == {"total": value}


def test_nan_comes_through() -> None:
    assert math.isnan(losses(StubTensor(math.nan))["total"])


def test_a_loss_that_was_not_reduced_is_its_mean() -> None:
    assert losses(StubTensor([1.0, 2.0, 6.0])) == {"total": 3.0}
    assert losses((StubTensor([1.0, 2.0, 6.0]), 5.0)) == {"total": 3.0, "1": 5.0}


def test_the_mean_of_a_half_precision_loss_is_not_rounded_to_half_precision() -> None:
    assert losses(StubTensor([2048.0, 2050.0], np.float16)) == {"total": 2049.0}


def test_a_part_with_several_elements_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(OWN, LossConfig())
    logits = retain((StubTensor(1.0), StubTensor(np.ones((2, 3)))))
    assert decoder.decode(logits).losses == {"total": 1.0}
    assert decoder.decode(logits).losses == {"total": 1.0}
    assert decoder.unknown == 2
    assert [record.getMessage() for record in caplog.records] == [
        "exporter: the output 1 (StubTensor of shape (2, 3)) is not a number of this step and is left out"
    ]


def test_a_detectors_four_losses_are_losses() -> None:
    outputs = (StubTensor(6.0), StubTensor(1.0), StubTensor(2.0), StubTensor(3.0))
    assert decode(outputs) == Decoded({"total": 6.0, "1": 1.0, "2": 2.0, "3": 3.0})


def test_a_detectors_losses_are_losses_also_when_its_class_derives_from_a_loss_scaled_cell() -> None:
    outputs = (StubTensor(6.0), StubTensor(1.0), StubTensor(2.0), StubTensor(3.0))
    assert decode(outputs, ("DetectorTrainCell", *SCALED)) == Decoded({"total": 6.0, "1": 1.0, "2": 2.0, "3": 3.0})


def test_the_parts_of_a_tuple_are_named_by_the_configuration() -> None:
    assert losses((6.0, 1.0, 2.0), names=("cls", "bbox")) == {"total": 6.0, "cls": 1.0, "bbox": 2.0}


def test_names_may_cover_the_total_too() -> None:
    assert losses((6.0, 1.0, 2.0), names=("sum", "cls", "bbox")) == {"total": 6.0, "cls": 1.0, "bbox": 2.0}


def test_names_that_are_too_few_leave_the_rest_its_positions() -> None:
    assert losses((6.0, 1.0, 2.0), names=("cls",)) == {"total": 6.0, "cls": 1.0, "2": 2.0}


@pytest.mark.parametrize(
    ("total", "names", "expected"),
    [
        ("2", (), {"total": 6.0, "0": 1.0, "1": 2.0}),
        ("2", ("cls", "bbox"), {"total": 6.0, "cls": 1.0, "bbox": 2.0}),
        ("all", ("cls", "bbox", "all"), {"total": 6.0, "cls": 1.0, "bbox": 2.0}),
        ("all", ("bbox", "all"), {"total": 6.0, "0": 1.0, "bbox": 2.0}),
    ],
)
def test_the_total_of_a_tuple_is_chosen_by_index_or_name(
    total: str, names: tuple[str, ...], expected: dict[str, float]
) -> None:
    assert losses((1.0, 2.0, 6.0), total=total, names=names) == expected


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"cls": 1.0, "loss": 6.0}, {"total": 6.0, "cls": 1.0}),
        ({"cls": 1.0, "total": 6.0}, {"total": 6.0, "cls": 1.0}),
        ({"cls": 1.0, "bbox": 2.0}, {"total": 3.0, "cls": 1.0, "bbox": 2.0}),
        (
            {"loss": {"cls": 1.0, "bbox": 2.0}, "aux": 5.0},
            {"total": 3.0, "loss.cls": 1.0, "loss.bbox": 2.0, "aux": 5.0},
        ),
        (
            {"loss": 6.0, "rpn": {"cls": 1.0, "bbox": (2.0, 3.0)}},
            {"total": 6.0, "rpn.cls": 1.0, "rpn.bbox.0": 2.0, "rpn.bbox.1": 3.0},
        ),
        ({}, {}),
    ],
)
def test_the_total_of_a_dict_is_loss_else_total_else_the_only_number_else_the_sum(
    outputs: dict[str, Any], expected: dict[str, float]
) -> None:
    assert losses(outputs) == expected
    assert list(losses(outputs)) == list(expected)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        ("cls", {"total": 1.0, "loss": 6.0, "rpn.a": 3.0}),
        ("rpn.a", {"total": 3.0, "loss": 6.0, "cls": 1.0}),
        ("rpn", {"total": 3.0, "loss": 6.0, "cls": 1.0}),
    ],
)
def test_the_total_of_a_dict_can_be_configured(total: str, expected: dict[str, float]) -> None:
    assert losses({"loss": 6.0, "cls": 1.0, "rpn": {"a": 3.0}}, total=total) == expected


def test_a_sum_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(OWN, LossConfig())
    for _ in range(3):
        decoder.decode(retain({"cls": 1.0, "bbox": 2.0}))
    assert len(caplog.records) == 1
    assert "the total is the sum of cls, bbox" in caplog.text


def test_a_sum_that_holds_nan_is_nan() -> None:
    assert math.isnan(losses({"cls": math.nan, "bbox": 2.0})["total"])


def test_a_configured_total_that_is_not_there_leaves_the_parts(caplog: pytest.LogCaptureFixture) -> None:
    assert losses({"cls": 1.0, "bbox": 2.0}, total="losss") == {"cls": 1.0, "bbox": 2.0}
    assert "no loss named 'losss'" in caplog.text


def test_a_nested_tuples_total_is_its_first_number() -> None:
    assert losses(((1.0, 2.0), 3.0)) == {"total": 1.0, "0.1": 2.0, "1": 3.0}


def test_none_among_losses_is_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert losses((1.0, None, 2.0)) == {"total": 1.0, "2": 2.0}
    assert not caplog.records


def test_a_part_cannot_take_the_name_of_the_total() -> None:
    assert losses({"loss": 1.0, "total": 2.0}) == {"total": 1.0}


def test_names_are_short_and_printable() -> None:
    found = losses({"loss": 1.0, "a\nb\ud800": 2.0, "x" * 200: 3.0})
    assert list(found) == ["total", "a_b_", "x" * 64]


def test_a_parameter_is_not_this_steps_loss(caplog: pytest.LogCaptureFixture) -> None:
    assert losses((1.0, Parameter(2.0))) == {"total": 1.0}
    assert "a Parameter, whose value changes later" in caplog.text


def test_outputs_too_large_to_be_held_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert losses(StubTensor(np.ones(2000))) == {}
    assert "StubTensor with 2000 elements" in caplog.text


# --- loss-scaled cells --------------------------------------------------------------------------------------------------


def test_a_loss_scaled_cell_gives_loss_overflow_and_scale() -> None:
    outputs = (StubTensor(2.5), StubTensor(False, np.bool_), StubTensor(1024.0))
    assert decode(outputs, SCALED) == Decoded({"total": 2.5}, overflow=False, loss_scale=1024.0)


FIVE = (StubTensor([2.5]), StubTensor(True, np.bool_), StubTensor(1024.0), StubTensor(0.125), StubTensor([0.5]))


@pytest.mark.parametrize(
    "cell",
    [
        TRANSFORMERS,
        ("CpuMFTrainOneStepCell", *TRANSFORMERS),
        ("MFPipelineWithLossScaleCell", *SCALED),
        OWN,
    ],
)
def test_five_outputs_are_loss_overflow_scale_rate_and_norm(cell: tuple[str, ...]) -> None:
    assert decode(FIVE, cell) == Decoded({"total": 2.5}, True, 1024.0, (0.125,), 0.5)


def test_local_norms_are_passed_over_in_silence() -> None:
    decoder = Decoder(TRANSFORMERS, LossConfig())
    decoded = decoder.decode(retain((*FIVE, StubTensor([1.0, 2.0]), (1, 2))))
    assert decoded == Decoded({"total": 2.5}, True, 1024.0, (0.125,), 0.5)
    assert decoder.unknown == 0


def test_four_outputs_have_no_norm() -> None:
    assert decode(FIVE[:4], TRANSFORMERS) == Decoded({"total": 2.5}, True, 1024.0, (0.125,))


def test_without_clipping_there_is_no_norm() -> None:
    decoder = Decoder(TRANSFORMERS, LossConfig())
    assert decoder.decode(retain((*FIVE[:4], None))).gradient_norm is None
    assert decoder.unknown == 0


@pytest.mark.parametrize("overflow", [True, np.bool_(True), StubTensor(True, np.bool_), StubTensor([True], np.bool_)])
def test_a_bool_in_the_second_place_says_overflow_whatever_the_class(overflow: Any) -> None:
    assert decode((1.0, overflow, 8.0)) == Decoded({"total": 1.0}, overflow=True, loss_scale=8.0)


def test_a_framework_cell_is_believed_without_a_bool() -> None:
    assert decode((1.0, StubTensor(1.0), 8.0), SCALED) == Decoded({"total": 1.0}, overflow=True, loss_scale=8.0)


def test_a_loss_scale_that_is_a_parameter_is_read_late() -> None:
    scale = Parameter(1024.0)
    decoder, held = Decoder(SCALED, LossConfig()), retain((1.0, False, scale))
    scale.array = np.array(512.0)
    assert decoder.decode(held).loss_scale == 512.0


def test_a_rate_that_is_a_parameter_is_left_to_the_optimisers_reading() -> None:
    decoder = Decoder(TRANSFORMERS, LossConfig())
    assert decoder.decode(retain((1.0, False, 8.0, Parameter(0.1), None))).learning_rates is None
    assert decoder.decode(retain((1.0, False, 8.0, (Parameter(0.1), Parameter(0.2)), None))).learning_rates is None
    assert decoder.unknown == 0


def test_a_gradient_norm_that_is_not_finite_comes_through() -> None:
    assert decode((1.0, True, 8.0, 0.1, math.inf), TRANSFORMERS).gradient_norm == math.inf


def test_a_rate_or_scale_that_is_not_finite_is_absent() -> None:
    decoded = decode((1.0, True, math.inf, math.nan, 1.0), TRANSFORMERS)
    assert decoded.loss_scale is None
    assert decoded.learning_rates is None


def test_a_loss_scaled_cell_may_return_named_losses() -> None:
    decoded = decode(({"loss": 3.0, "aux": 1.0}, False, 8.0), SCALED)
    assert decoded == Decoded({"total": 3.0, "aux": 1.0}, False, 8.0)


def test_more_outputs_than_anybody_knows_are_named() -> None:
    decoder = Decoder(TRANSFORMERS, LossConfig())
    assert decoder.decode(retain((*FIVE, 7.0))).gradient_norm == 0.5
    assert decoder.unknown == 1


# --- gradients ----------------------------------------------------------------------------------------------------------

GRADIENTS = {"weight": StubTensor(np.ones((4, 4))), "bias": StubTensor([0.5]), "big": StubTensor(np.ones(5000))}


@pytest.mark.parametrize("cell", [PLAIN, ("MyCell", *PLAIN)])
def test_returned_gradients_are_no_losses(cell: tuple[str, ...]) -> None:
    decoder = Decoder(cell, LossConfig())
    assert decoder.decode(retain((StubTensor(1.0), GRADIENTS))) == Decoded({"total": 1.0})
    assert decoder.unknown == 0


def test_gradients_of_scalar_parameters_are_no_losses_of_the_plain_cell() -> None:
    assert losses((1.0, {"bias": StubTensor([0.5])}), PLAIN) == {"total": 1.0}


def test_a_derived_cell_may_return_named_parts() -> None:
    assert losses((1.0, {"cls": StubTensor(0.5)}), ("MyCell", *PLAIN)) == {"total": 1.0, "1.cls": 0.5}


# --- hand-written loops -------------------------------------------------------------------------------------------------

NOTHING = RecordedValues({}, (), None, None, None, None, None)


def recorded(**values: Any) -> Decoded:
    held = {name: retain(value) for name, value in values.items()}
    return Decoder((), LossConfig()).decode(replace(NOTHING, **held))


def test_a_hand_written_loop_gives_its_values_by_name() -> None:
    decoded = recorded(
        losses={"total": StubTensor(3.0), "aux": 1.0},
        learning_rates=(StubTensor(0.5), 0.25),
        gradient_norm=StubTensor(2.0),
        parameter_norm=4.0,
        update_ratio=0.001,
        loss_scale=8,
        overflow=False,
    )
    assert decoded == Decoded({"total": 3.0, "aux": 1.0}, False, 8.0, (0.5, 0.25), 2.0, 4.0, 0.001)


def test_what_a_hand_written_loop_leaves_out_is_absent() -> None:
    assert recorded() == Decoded({})


def test_a_hand_written_loop_may_give_the_optimisers_own_parameter_as_rate() -> None:
    assert recorded(learning_rates=(Parameter(0.5),)).learning_rates == (0.5,)


# --- late reads ---------------------------------------------------------------------------------------------------------


def test_a_late_read_that_gives_the_same_is_accepted_nan_included() -> None:
    held = retain((StubTensor(1.0), {"a": StubTensor(math.nan)}))
    assert Decoder(OWN, LossConfig()).compare(held, read_now(held))


def test_a_value_that_changed_after_its_step_is_found() -> None:
    loss = StubTensor(1.0)
    held = retain((loss, 2.0))
    immediate = read_now(held)
    loss.array = np.array(1.5)
    assert not Decoder(OWN, LossConfig()).compare(held, immediate)


def test_a_late_read_that_fails_is_not_equal() -> None:
    loss = StubTensor(1.0)
    held = retain(loss)
    immediate = read_now(held)
    del loss.array
    assert not Decoder(OWN, LossConfig()).compare(held, immediate)


@pytest.mark.parametrize(
    ("outputs", "cell"),
    [
        (FIVE, TRANSFORMERS),
        (StubTensor([1.0, 3.0]), OWN),
        ((StubTensor(1.0), StubTensor(False, np.bool_), Parameter(8.0)), SCALED),
        ({"loss": StubTensor(1.0), "parts": (StubTensor(2.0), 3)}, OWN),
        ((StubTensor(1.0), GRADIENTS), PLAIN),
    ],
)
def test_what_was_frozen_in_the_hook_decodes_alike(outputs: Any, cell: tuple[str, ...]) -> None:
    held = retain(outputs)
    assert Decoder(cell, LossConfig()).decode(freeze(held)) == Decoder(cell, LossConfig()).decode(held)


nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.builds(StubTensor, st.floats(width=32) | st.lists(st.floats(width=32), max_size=3)),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children) | st.tuples(children, children),
    max_leaves=50,
)


@given(
    nested,
    st.sampled_from([SCALED, TRANSFORMERS, PLAIN, OWN, ()]),
    st.sampled_from([{}, {"total": "1"}, {"names": ("a", "b")}, {"total": "a"}]),
)
def test_no_shape_of_outputs_raises(outputs: Any, cell: tuple[str, ...], loss: dict[str, Any]) -> None:
    logging.disable()
    try:
        decoded = decode(outputs, cell, **loss)
    finally:
        logging.disable(logging.NOTSET)
    assert all(type(value) is float for value in decoded.losses.values())
    assert all(len(name) <= 64 for name in decoded.losses)


def test_the_log_is_not_filled_by_names_that_change(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(OWN, LossConfig())
    for step in range(500):
        decoder.decode(retain({"loss": 1.0, f"text{step}": "x"}))
    assert decoder.unknown == 500
    assert len(caplog.records) == 64

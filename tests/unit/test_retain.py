"""`retain`, on the training thread: references of small things only, nothing converted, nothing raised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspore_exporter.decode import (
    MAX_ELEMENTS_OF_RECORD,
    MAX_LEAVES,
    Dropped,
    Live,
    Named,
    footprint,
    freeze,
    read_now,
    retain,
)


class StubTensor:
    """Has what a MindSpore tensor has, and counts conversions."""

    def __init__(self, *values: float, dtype: str = "float32", shape: tuple[int, ...] = ()) -> None:
        self.array = np.array(values, dtype=dtype).reshape(shape or ((len(values),) if len(values) != 1 else ()))
        self.conversions = 0

    @property
    def size(self) -> int:
        return self.array.size

    def item(self) -> Any:
        self.conversions += 1
        return self.array.item()

    def asnumpy(self) -> Any:
        self.conversions += 1
        return self.array

    def __float__(self) -> float:
        raise AssertionError("a tensor must not be converted so")

    __bool__ = __len__ = __iter__ = __eq__ = __float__  # type: ignore[assignment]
    __hash__ = object.__hash__


Parameter = type("Parameter", (StubTensor,), {"__module__": "mindspore.common.parameter"})


class Hostile:
    asnumpy = item = None

    @property
    def size(self) -> int:
        raise RuntimeError("the device is gone")


def test_a_scalar_tensor_is_held_itself() -> None:
    loss = StubTensor(1.5)
    assert retain(loss) is loss


def test_nothing_is_converted() -> None:
    loss, part, small = StubTensor(1.5), StubTensor(0.5), StubTensor(1.0, 2.0)
    retain((loss, {"part": part, "nested": [small, part]}, Parameter(1.0)))
    assert loss.conversions == part.conversions == small.conversions == 0


def test_positions_stay_where_something_is_left_out() -> None:
    loss, big, scale = StubTensor(1.0), StubTensor(*range(2000)), StubTensor(1024.0)
    assert retain((loss, big, scale)) == (loss, Dropped("StubTensor", 2000), scale)


def test_a_tensor_of_1024_elements_is_held_and_one_of_1025_is_not() -> None:
    held, left = StubTensor(*range(1024)), StubTensor(*range(1025))
    assert retain(held) is held
    assert retain(left) == Dropped("StubTensor", 1025)


def test_lists_and_dicts_become_immutable() -> None:
    loss = StubTensor(1.0)
    assert retain([loss, {"a": 2.0}]) == (loss, Named(("a",), (2.0,)))


def test_python_numbers_and_none_are_kept() -> None:
    assert retain((1, 2.5, True, None)) == (1, 2.5, True, None)


def test_a_numpy_buffer_that_is_used_again_does_not_change_the_record() -> None:
    buffer = np.array([1.0])
    held = retain((buffer, np.float32(2.0)))
    buffer[0] = 9.0
    assert held[0][0] == 1.0
    assert held[1] == np.float32(2.0)


def test_a_parameter_is_wrapped_because_it_changes() -> None:
    scale = Parameter(1024.0)
    held = retain((StubTensor(1.0), scale))[1]
    assert isinstance(held, Live)
    assert held.value is scale


def test_a_large_parameter_is_not_held() -> None:
    assert retain(Parameter(1.0, 2.0)) == Dropped("Parameter", 2)


def test_a_train_cell_that_returns_every_gradient_costs_little() -> None:
    gradients = {f"layer{i}.weight": StubTensor(*range(2000)) for i in range(500)}
    loss = StubTensor(1.0)
    held = retain((loss, gradients))
    assert held[0] is loss
    assert len(held[1].values) == 5
    assert (held[1].values[-1].what, held[1].values[-1].size) == ("rest of a dict", 496)


def test_values_that_are_too_large_end_the_looking_where_the_container_is_short_too() -> None:
    gradients = {f"layer{i}.weight": StubTensor(*range(2000)) for i in range(50)}
    held = retain((StubTensor(1.0), gradients))[1]
    assert held.names == ("layer0.weight", "layer1.weight", "layer2.weight", "layer3.weight", "...")
    assert held.values[-1].size == 46


def test_a_record_holds_64_values_at_most() -> None:
    def count(node: Any) -> int:
        return sum(map(count, getattr(node, "values", node))) if isinstance(node, tuple) else 1

    wide = tuple({f"{i}": StubTensor(float(i)) for i in range(50)} for _ in range(30))
    assert count(retain(wide)) <= MAX_LEAVES + 30


def test_a_record_holds_64_kib_at_most() -> None:
    many = tuple(StubTensor(*range(1024)) for _ in range(60))
    assert footprint(retain(many)) <= 8 * MAX_ELEMENTS_OF_RECORD + 60 * 256 + 64


def test_eight_of_the_largest_records_stay_under_one_mebibyte() -> None:
    largest = retain(tuple(StubTensor(*range(1024)) for _ in range(64)))
    assert 8 * footprint(largest) < 1024 * 1024


def test_a_structure_that_holds_itself_ends() -> None:
    endless: list[Any] = [StubTensor(1.0)]
    endless.append(endless)
    held = retain(endless)
    assert held[0] is endless[0]


@pytest.mark.parametrize("outputs", [Hostile(), "text", object(), {1, 2}, b"x", 1j, lambda: None])
def test_what_nobody_knows_is_left_out_without_raising(outputs: Any) -> None:
    assert retain(outputs) == Dropped(type(outputs).__name__, 0)


def test_an_object_that_raises_costs_its_own_place_only() -> None:
    loss = StubTensor(1.0)
    assert retain((loss, Hostile())) == (loss, Dropped("Hostile", 0))


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.builds(StubTensor, st.floats(width=32)),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children) | st.tuples(children, children),
    max_leaves=100,
)


@given(nested)
def test_any_structure_is_held_read_and_frozen_without_an_error(outputs: Any) -> None:
    held = retain(outputs)
    numbers = read_now(held)
    assert np.array_equal(read_now(freeze(held)), numbers, equal_nan=True)
    assert footprint(held) >= 0


def test_numbers_are_read_in_walking_order() -> None:
    outputs = (StubTensor(1.0), {"a": StubTensor(2.0), "b": [True, 3]}, None, np.float32(4.0))
    assert read_now(retain(outputs)) == (1.0, 2.0, 1.0, 3.0, 4.0)


def test_a_parameter_is_not_read_for_the_comparison() -> None:
    assert read_now(retain((StubTensor(1.0), Parameter(1024.0)))) == (1.0,)


def test_a_loss_that_was_not_reduced_is_compared_by_its_mean() -> None:
    assert read_now(retain(StubTensor(1.0, 3.0))) == (2.0,)


def test_what_was_frozen_holds_no_tensor() -> None:
    frozen = freeze(retain((StubTensor(1.0), Parameter(8.0), StubTensor(1.0, 2.0), {"a": StubTensor(2.0)})))
    assert frozen[0] == 1.0
    assert frozen[1].value == 8.0
    assert frozen[2].tolist() == [1.0, 2.0]
    assert frozen[3] == Named(("a",), (2.0,))

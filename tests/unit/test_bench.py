"""The bench's statistics and its verdicts: a missed bar must never read as held."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.figures import interval, mean, median, paired_differences, paired_ratios, percentile
from benchmarks.run import OURS, Bar, conversion_bars, cost_bars, hook_bars


def test_a_percentile_lies_between_the_two_values_around_it() -> None:
    assert percentile([10.0, 0.0], 0.25) == 2.5
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_the_ends_of_the_percentiles_are_the_least_and_the_greatest_value() -> None:
    values = [3.0, 1.0, 2.0]
    assert (percentile(values, 0.0), percentile(values, 1.0)) == (1.0, 3.0)


def test_one_value_is_each_of_its_percentiles() -> None:
    assert percentile([4.0], 0.99) == 4.0


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.1, 99.0])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0, 2.0], share)


def test_equal_pairs_have_an_interval_without_width() -> None:
    assert interval([0.5] * 40, mean) == (0.5, 0.5)


def test_the_interval_of_a_mean_is_close_to_the_normal_one() -> None:
    values = [float(number % 10) for number in range(400)]
    low, high = interval(values, mean)
    half = 1.96 * statistics.stdev(values) / 400**0.5
    assert low == pytest.approx(4.5 - half, abs=0.05)
    assert high == pytest.approx(4.5 + half, abs=0.05)


def test_one_wild_block_moves_the_interval_of_the_mean_and_not_that_of_the_median() -> None:
    values = [1.0] * 39 + [1000.0]
    assert interval(values, median) == (1.0, 1.0)
    assert interval(values, mean)[1] > 10.0


def test_the_same_pairs_give_the_same_interval() -> None:
    values = [0.1, 0.5, 0.2, 0.9]
    assert interval(values, median) == interval(values, median)


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least two"):
        interval([1.0], mean)


def test_pairs_are_compared_block_by_block() -> None:
    assert paired_differences([3.0, 5.0], [1.0, 2.0]) == [2.0, 3.0]
    assert paired_ratios([3.0, 5.0], [1.0, 2.0]) == [3.0, 2.5]


@pytest.mark.parametrize("compare", [paired_differences, paired_ratios])
def test_a_block_without_a_partner_is_an_error(compare: object) -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([1.0, 2.0], [1.0])  # type: ignore[operator]


def test_a_bar_that_is_just_reached_is_held() -> None:
    assert Bar("hook", 15, 15.0, "us").row() == "| hook | 15 us | 15.0 us | held |"


def test_a_missed_bar_says_by_how_much() -> None:
    assert Bar("hook", 15, 18.5, "us").row() == "| hook | 15 us | 18.5 us | **missed by 3.5 us** |"


def test_a_figure_that_could_not_be_measured_is_not_held() -> None:
    assert Bar("hook", 15, None, "us").row() == "| hook | 15 us | not measured | **not shown** |"


def row(hook: float, added: float) -> dict[str, float]:
    return {"hook_median_us": hook, "hook_p99_us": hook, "added_us": added}


def test_what_we_add_is_held_against_the_least_of_the_others() -> None:
    rows = {"none": row(0, 0), OURS: row(10, 30), "slow": row(900, 800), "quick": row(20, 25)}
    (bar,) = [bar for bar in hook_bars({("graph", "1 ms"): {"rows": rows}}) if bar.name.startswith("added")]
    assert (bar.limit, bar.value) == (25, 30)
    assert "quick" in bar.name


def test_without_mflossmonitor_its_bar_is_not_measured() -> None:
    found = hook_bars({("graph", "1 ms"): {"rows": {"none": row(0, 0), OURS: row(10, 30)}}})
    (bar,) = [bar for bar in found if "MFLossMonitor" in bar.name]
    assert bar.value is None


def test_conversions_of_a_bare_training_are_not_ours() -> None:
    counts = {"none": {"before": 1, "in_steps": 4}, OURS: {"before": 1, "in_steps": 24}}
    found = conversion_bars({("graph", "1 ms"): {"conversions": counts}})
    assert [(bar.limit, bar.value) for bar in found] == [(20, 20), (20, 20)]


def test_a_conversion_before_the_first_step_counts_for_the_whole_run_only() -> None:
    counts = {"none": {"before": 0, "in_steps": 0}, OURS: {"before": 1, "in_steps": 20}}
    in_steps, in_all = conversion_bars({("graph", "1 ms"): {"conversions": counts}})
    assert (in_steps.value, in_all.value) == (20, 21)
    assert "missed" in in_all.row()


def test_conversions_that_could_not_be_counted_are_not_measured() -> None:
    counts = {"none": {"before": 0, "in_steps": 0}, OURS: {"failed": "RuntimeError: no"}}
    found = conversion_bars({("graph", "1 ms"): {"conversions": counts}})
    assert [bar.value for bar in found] == [None, None]


def test_the_ratio_is_judged_by_the_end_of_its_interval_and_not_by_its_middle() -> None:
    result = {
        "records_a_second": 20.0,
        "cpu_us_a_record": 100.0,
        "ratio_interval": (0.985, 1.004),
        "pairs": 44,
    }
    (bar,) = [bar for bar in cost_bars({("graph", "50 ms"): result}) if "throughput" in bar.name]
    assert bar.value == pytest.approx(0.015)
    assert "missed" in bar.row()


def test_cpu_is_judged_by_the_record_up_to_20_a_second_and_by_the_core_above() -> None:
    slow = {"records_a_second": 19.0, "cpu_us_a_record": 140.0, "ratio_interval": (1.0, 1.0), "pairs": 44}
    fast = {**slow, "records_a_second": 900.0, "cpu_share": 0.06, "step_p99_ms": {"with": 2.0, "without": 1.0}}
    assert cost_bars({("graph", "50 ms"): slow})[0].unit == "us"
    assert cost_bars({("graph", "1 ms"): fast})[0].value == pytest.approx(6.0)

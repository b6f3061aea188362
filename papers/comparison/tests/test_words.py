"""The words that compare our values with those of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from testbed_comparison.rows import Difference, Ratio, Row, Saving, Value, terms
from testbed_comparison.words import (
    OurValue,
    compute_our_value,
    evaluate,
    ranking_of,
    shares_of_paper,
    word_for,
)

ACCURACY, OTHER = (
    Value(metric="accuracy"),
    Value(metric="accuracy", at={"method": "other"}),
)


def row(paper, kind="measured", ours=ACCURACY, **keys):
    return Row(
        item="Table 1",
        name="a row",
        kind=kind,
        paper=paper,
        scenario="s",
        ours=ours,
        **keys,
    )


def trained(mean, half_width, runs=5):
    return OurValue(mean, mean, half_width, runs, is_timing=False)


def timed(low, high=None):
    return OurValue(low, low if high is None else high, None, 1, is_timing=True)


def ours_of(
    values: Mapping[str, Sequence[float | None]], *expressions, unit="", is_timing=False
):
    return compute_our_value(
        expressions,
        unit,
        lambda value: values[value.at.get("method", "")],
        is_timing=is_timing,
    )


@pytest.mark.parametrize(
    ("paper", "value", "word"),
    [
        ("22", 22, "exact"),
        ("68", 68.06, "exact"),
        ("14.8", 14.84, "exact"),
        ("14.8", 14.86, "differs"),
        ("0", 0, "exact"),
    ],
)
def test_arithmetic_is_exact_to_printed_digits(paper, value, word):
    assert word_for(row(paper, "arithmetic"), timed(value)) == word


@pytest.mark.parametrize(
    ("mean", "half_width", "word"),
    [
        (80.0, 1.0, "agrees"),
        (80.0, 0.3, "differs"),  # the interval excludes the paper's value
        (80.0, 9.0, "differs"),  # the interval is too wide to confirm anything
        (82.0, 1.0, "differs"),
        (80.5, None, "differs"),  # one run of a training has no interval
    ],
)
def test_training_agrees_if_narrow_interval_contains_paper_value(
    mean, half_width, word
):
    assert (
        word_for(
            row("80.5", unit="%"), trained(mean, half_width, 5 if half_width else 1)
        )
        == word
    )


def test_time_agrees_to_printed_digits_or_within_printed_range():
    assert word_for(row("1.12"), timed(1.118)) == "agrees"
    assert word_for(row("1.15"), timed(1.12)) == "differs"
    assert word_for(row(("1.5", "2.3")), timed(1.7, 2.25)) == "agrees"
    assert word_for(row(("1.5", "2.3")), timed(1.4, 2.25)) == "differs"
    assert word_for(row((None, "1.81")), timed(0.3, 1.8)) == "agrees"
    assert word_for(row(("80", None)), timed(79)) == "differs"


def test_fitted_row_is_calibrated_only_near_paper_value():
    fitted = row(("19.5", "21.6"), fitted="speed of a device")
    assert word_for(fitted, timed(7.0, 7.3)) == "differs"
    assert word_for(fitted, timed(19.0, 21.0)) == "calibrated"
    assert word_for(row("10.0", fitted="latency"), timed(10.9)) == "calibrated"
    assert word_for(row("10.0", fitted="latency"), timed(11.1)) == "differs"


def test_tolerance_of_ratio_depends_on_distance_from_one():
    speed_up = row("1.06", unit="x", fitted="speed of a device")
    assert word_for(speed_up, timed(1.055)) == "calibrated"
    assert word_for(speed_up, timed(1.013)) == "differs"
    # The paper's effect is 1.47, of which an interval of 0.14 is less than a tenth and one of 0.2 is more.
    assert word_for(row("2.47", unit="x"), trained(2.5, 0.14)) == "agrees"
    assert word_for(row("2.47", unit="x"), trained(2.5, 0.2)) == "differs"


def test_row_with_other_data_is_not_comparable_or_not_run():
    other = row("80.0", data="digits of 8x8")
    assert word_for(other, trained(80.0, 0.1)) == "not comparable"
    assert word_for(other, None) == "not run"


def test_row_with_other_metric_may_differ_but_never_agrees():
    last = row("80.0", other_metric="the last accuracy instead of the highest")
    assert word_for(last, trained(80.0, 0.1)) == "not comparable"
    assert word_for(last, trained(60.0, 0.1)) == "differs"


@pytest.mark.parametrize(
    ("paper", "mean", "half_width", "word"),
    [
        ("larger", 3.0, 2.9, "same ranking"),
        ("larger", 3.0, 3.1, "differs"),
        ("larger", -3.0, 1.0, "differs"),
        ("similar", 1.0, 2.0, "same ranking"),
        ("similar", 3.0, 1.0, "same ranking"),
        ("similar", 3.0, 2.5, "differs"),
        # An interval this wide contains nearly every difference.
        ("similar", 1.0, 20.0, "differs"),
    ],
)
def test_ranking_needs_significant_difference(paper, mean, half_width, word):
    ranking = row(
        paper, "ranking", Difference(difference=(ACCURACY, OTHER)), unit="points"
    )
    assert word_for(ranking, trained(mean, half_width)) == word


@pytest.mark.parametrize(
    ("paper", "mean", "half_width", "order"),
    [
        ("larger", 3.0, 2.9, "as claimed"),
        ("larger", 3.0, 3.1, "undecided"),
        ("larger", -3.0, 2.9, "opposite"),
        ("similar", 1.0, 2.0, "as claimed"),
        ("similar", 1.0, 20.0, "undecided"),
        ("similar", -9.0, 2.0, "opposite"),
    ],
)
def test_wide_interval_is_undecided_and_another_order_is_opposite(
    paper, mean, half_width, order
):
    ranking = row(
        paper, "ranking", Difference(difference=(ACCURACY, OTHER)), unit="points"
    )
    assert ranking_of(ranking, trained(mean, half_width)) == order


def test_ranking_with_fitted_parameter_is_calibrated():
    ratio = Ratio(ratio=(ACCURACY, OTHER))
    ranking = row("larger", "ranking", ratio, unit="x", fitted="rate")
    assert word_for(ranking, timed(1.2)) == "calibrated"


def test_shares_of_paper_omit_open_end_of_range():
    ours = timed(3.0, 6.0)
    assert shares_of_paper(row(("2", "4")), ours) == (1.5, 1.5)
    assert shares_of_paper(row((None, "4")), ours) == (1.5,)
    assert shares_of_paper(row("3"), ours) == (1.0, 2.0)


def test_times_of_one_run_are_similar_within_five_percent():
    ranking = row("similar", "ranking", Ratio(ratio=(ACCURACY, OTHER)), unit="x")
    assert word_for(ranking, timed(1.026)) == "same ranking"
    assert word_for(ranking, timed(1.06)) == "differs"


def test_ratio_ranks_times_but_not_training_with_one_seed():
    ranking = row("larger", "ranking", Ratio(ratio=(ACCURACY, OTHER)), unit="x")
    assert word_for(ranking, timed(1.2)) == "same ranking"
    assert word_for(ranking, timed(0.9)) == "differs"
    assert word_for(ranking, trained(1.2, None, 1)) == "differs"


def test_expressions_pair_values_of_same_repetition():
    values = {"": [0.8, 0.6, 0.7], "other": [0.7, 0.5, 0.6]}
    ours = ours_of(values, Difference(difference=(ACCURACY, OTHER)), unit="points")
    assert ours.low == pytest.approx(10)
    assert ours.half_width == pytest.approx(0, abs=1e-9)
    assert evaluate(
        Ratio(ratio=(ACCURACY, OTHER)), lambda value: [1.0] if value.at else [2.0]
    ) == [2.0]
    assert evaluate(
        Saving(saving=(ACCURACY, OTHER)), lambda value: [4.0] if value.at else [3.0]
    ) == [0.25]


def test_nested_ratios_pair_values_of_same_repetition():
    def values(value):
        return [8.0, None, 6.0] if value == ACCURACY else [2.0, 2.0, 3.0]

    inner = Ratio(ratio=(ACCURACY, OTHER))
    assert evaluate(Ratio(ratio=(inner, OTHER)), values) == [
        pytest.approx(2.0),
        pytest.approx(2 / 3),
    ]
    assert terms(Ratio(ratio=(inner, OTHER))) == (ACCURACY, OTHER, OTHER)


def test_repetition_without_value_is_excluded_from_pairs():
    values = {"": [4.0, None, 9.0], "other": [2.0, 5.0, 3.0]}
    ours = ours_of(values, Ratio(ratio=(ACCURACY, OTHER)))
    assert (ours.low, ours.runs) == (2.5, 2)
    assert ours_of({"": [None, None]}, ACCURACY) is None


def test_interval_uses_students_t_distribution():
    ours = ours_of({"": [1.0, 2.0, 3.0]}, ACCURACY)
    assert (ours.low, ours.runs) == (2.0, 3)
    # The 97.5 % quantile of Student's t with two degrees of freedom is 4.303; the standard deviation is 1.
    assert ours.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_several_expressions_give_range_unless_value_is_missing():
    values = {"": [120.0], "other": [60.0]}
    ours = ours_of(values, ACCURACY, OTHER, unit="min", is_timing=True)
    assert (ours.low, ours.high, ours.half_width) == (1.0, 2.0, None)
    assert ours_of({"": [120.0], "other": []}, ACCURACY, OTHER) is None


@pytest.mark.parametrize(
    ("ratio", "word"), [(1.029, "differs"), (1.031, "same ranking")]
)
def test_times_of_one_run_rank_only_beyond_difference_of_clocks(ratio, word):
    ranking = row("larger", "ranking", Ratio(ratio=(ACCURACY, OTHER)), unit="x")
    assert word_for(ranking, OurValue(ratio, ratio, None, 1)) == word

"""Conditions of `expect`, and the metrics that they can name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.conditions import parse_condition
from testbed.methods import METHODS
from testbed.scenario.expect import evaluate
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed.trace.registry import COMMON, metric_kind, metrics_of


@pytest.mark.parametrize(
    ("text", "kind", "holding", "failing"),
    [
        (">= 0.9", "share", 0.9, 0.899),
        (">=90%", "share", 0.95, 0.85),
        ("> 2", "number", 3, 2),
        ("<= 1", "number", 1, 1.5),
        # Units are converted.
        ("< 60s", "seconds", 59.9, 60.0),
        ("< 1min", "seconds", 59.9, 60.0),
        ("== 1", "number", 1, 2),
        ("!= 0", "number", 1, 0),
        ("< 1MB", "bytes", 999_999, 1e6),
        # Between 0.225 and 0.275 s.
        ("within 10% of 0.25s", "seconds", 0.2251, 0.2749999 + 0.01),
        ("within 10% of 250ms", "seconds", 0.2749, 0.22),
        ("within 50% of 4", "number", 6, 6.1),
        ("== true", "bool", True, False),
        ("!= true", "bool", False, True),
        ("== finished", "text", "finished", "failed"),
        ("== timed out", "text", "timed out", "failed"),
    ],
)
def test_condition_holds_for_values_within_bounds(text, kind, holding, failing):
    condition = parse_condition(text, kind)
    assert condition.holds(holding)
    assert not condition.holds(failing)
    # A missing or undefined value fulfils no condition.
    assert not condition.holds(None)
    assert not condition.holds(float("nan"))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("0.9", "share", "is not a condition: write one such as '>= 0.9'"),
        ("=> 0.9", "share", "is not a condition"),
        (">= high", "share", "'high' is not a number"),
        ("< inf", "number", "'inf' is not a finite number"),
        ("< 60", "seconds", "'60' has no unit: a duration is written like '5ms'"),
        # Metres or minutes?
        ("< 5m", "seconds", "write 'min'"),
        ("within 0.1 of 3", "number", "write '10%'"),
        ("within 10% of 3", "seconds", "'3' has no unit"),
        ("== yes", "bool", "'yes' is neither true nor false"),
        (">= true", "bool", "uses an order comparison for a value without an order"),
        ("within 1% of finished", "text", "a tolerance, which this metric cannot have"),
    ],
)
def test_invalid_condition_is_rejected(text, kind, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_condition(text, kind)


@given(
    st.text(), st.sampled_from(["share", "seconds", "bytes", "number", "bool", "text"])
)
def test_any_text_is_condition_or_value_error(text, kind):
    try:
        condition = parse_condition(text, kind)
    except ValueError:
        return
    # A valid condition accepts any value.
    assert condition.holds(object()) is False


def test_true_and_one_are_not_equal_in_conditions():
    # They are equal in Python.
    assert not parse_condition("== 1", "number").holds(True)
    assert not parse_condition("== true", "bool").holds(1)


def test_results_of_expectations_keep_order_and_missing_values():
    metrics = {
        "accuracy": 0.95,
        "recovery_time": None,
        "devices": {"worker1": {"idle_share": 0.25}},
    }
    expect = {
        "recovery_time": "< 5s",
        "accuracy": ">= 0.9",
        "devices.worker1.idle_share": "< 20%",
        "latency": "< 1s",
    }
    results = evaluate(expect, metrics, COMMON)
    rows = [(result.key, result.value, result.holds) for result in results]
    assert rows == [
        ("recovery_time", None, False),
        ("accuracy", 0.95, True),
        ("devices.worker1.idle_share", 0.25, False),
        ("latency", None, False),
    ]


def test_kinds_of_metrics_of_devices():
    assert metric_kind("devices.worker1.bytes_sent", COMMON) == "bytes"
    assert metric_kind("devices.worker1.compute", COMMON) == "seconds"


@pytest.mark.parametrize(
    "name",
    ["acuracy", "devices.worker1", "devices.worker1.acuracy", "links.a.b"],
)
def test_unknown_metric_has_no_kind(name):
    with pytest.raises(KeyError):
        metric_kind(name, COMMON)


GROUPED_NAMES = {
    "layers.<layer>.dropped": "layers.2.dropped",
    "devices.<device>.trust": "devices.pi1.trust",
    "cache_bytes.<device>": "cache_bytes.pi1",
    "send_per_token.<device>": "send_per_token.pi1",
}
"""Names with a placeholder, and a value of each."""
GROUPED_METRICS = {name: Metric(name, "share", "", len) for name in GROUPED_NAMES}


@pytest.mark.parametrize("name", GROUPED_NAMES.values())
def test_metric_of_group_is_named_with_member(name):
    assert metric_kind(name, GROUPED_METRICS) == "share"


def test_expectation_of_metric_of_group_is_evaluated():
    (result,) = evaluate(
        {"layers.2.dropped": "< 10%"},
        {"layers": {"2": {"dropped": 0.05}}},
        GROUPED_METRICS,
    )
    assert result.holds


@pytest.mark.parametrize(
    "name", ["layers.dropped", "layers.2.droped", "lairs.2.dropped"]
)
def test_incomplete_or_misspelt_name_of_group_has_no_kind(name):
    with pytest.raises(KeyError):
        metric_kind(name, GROUPED_METRICS)


@pytest.mark.parametrize("name", ["devices", "verdict", "recovery_list"])
def test_metric_named_as_part_of_metrics_file_is_rejected(name):
    metric = Metric(name, "number", "any value", len)
    with pytest.raises(ValueError, match=f"the metric '{name}' .* rename the metric"):
        metrics_of(MetricsSpec((metric,)))


@pytest.mark.parametrize("name", ["links", "accuracy", "metrics", "laps", "rounds"])
def test_list_named_as_other_value_is_rejected(name):
    metrics = (
        Metric("laps", "number", "any value", len),
        Metric("rounds.<round>.losses", "number", "any value", len),
    )
    with pytest.raises(ValueError, match=f"the list '{name}' .* rename the list"):
        metrics_of(MetricsSpec(metrics, lists={name: lambda _: []}))


def test_method_adds_metric_with_new_name():
    laps = Metric(
        "laps", "number", "rounds of the token", lambda record: len(record.of("lap"))
    )
    assert metrics_of(MetricsSpec(metrics=(laps,)))["laps"] is laps


def test_method_cannot_redefine_common_metric():
    loss = Metric("loss", "number", "x", lambda record: None)
    with pytest.raises(ValueError, match="two metrics are called 'loss'"):
        metrics_of(MetricsSpec(metrics=(loss,)))


METRIC_NAME = r"((layer|device)s\.<\2>\.)?[a-z][a-z_0-9]*|metrics\.<metric>"
"""Lower-case letters, digits and underscores, for a group after its placeholder."""


def test_metrics_of_all_methods_have_valid_names_and_descriptions():
    for method in METHODS.values():
        for name, metric in metrics_of(method.declared).items():
            assert re.fullmatch(METRIC_NAME, name)
            assert metric.meaning
            assert not metric.meaning.endswith(".")

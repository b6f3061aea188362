"""Validation of the faults of a scenario."""

from dataclasses import replace

import pytest

from testbed.faults.conditions import FaultContext
from testbed.faults.parts import FaultPart, devices_named, problems
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.network.radio import Propagation, Radio
from testbed.scenario.schema import Scenario
from testbed.trace.metrics_spec import NOTHING, events_of


def parse_faults(*keys):
    return [FaultPart.model_validate(fault) for fault in keys]


FLAP = {"between": ["a", "b"], "down": "1s", "up": "2s"}


def test_link_targets_are_formatted_as_text():
    parts = parse_faults(
        {"degrade": {"between": ["a", "b"], "loss": "1%"}, "at": "1s"},
        {"degrade": {"from": "a", "to": "b", "loss": "1%"}, "at": "1s"},
        {"degrade": {"device": "c", "loss": "1%"}, "at": "1s"},
        {"heal": "all", "at": "1s"},
    )
    assert [part.action.target for part in parts] == ["a <-> b", "a -> b", "c", "all"]
    assert devices_named(parts[0]) == [
        (("degrade", "between", 0), "a"),
        (("degrade", "between", 1), "b"),
    ]


def faults_in_context(*faults):
    """Return the parsed faults of a scenario of three devices, without a link between b and c, and their context."""
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {
                "model": {"name": "mlp"},
                "method": {"name": "single"},
                "steps": 5,
            },
            "faults": list(faults),
            "time_limit": "60s",
        }
    )
    pairs = [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")]
    links = {pair: Link() for pair in pairs}
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    return scenario.faults, FaultContext(devices, links, time_limit=60)


def spans_of(device):
    # Device b has no part in the plan.
    return {"forward", "backward"} if device == "a" else set()


@pytest.mark.parametrize(
    ("fault", "key", "message"),
    [
        ({"kill": "a", "after": "1s"}, "after", "the first fault has no predecessor"),
        ({"kill": "a", "at": "60s"}, "at", "time_limit"),
        ({"partition": [["a", "b"], ["a"]], "at": "1s"}, "partition", "named twice"),
        ({"partition": [["a", "b", "c"]], "at": "1s"}, "partition", "has no effect"),
        ({"degrade": {"device": "a"}, "at": "1s"}, "degrade", "has no effect"),
        (
            {"degrade": {"device": "a", "preset": "5g"}, "at": "1s"},
            "degrade.preset",
            "unknown preset '5g'",
        ),
        (
            {"degrade": {"between": ["b", "c"], "loss": "1%"}, "at": "1s"},
            "degrade",
            "no link",
        ),
        (
            {"obstruct": {"device": "a", "path_loss_exponent": 6}, "at": "1s"},
            "obstruct",
            "requires `network.radio`: define",
        ),
        (
            {"restart": "a", "at": "1s"},
            "restart",
            "no fault of this scenario kills 'a'",
        ),
        (
            {"join": "a", "at": "1s"},
            "join",
            "no fault of this scenario kills or retires 'a'",
        ),
        (
            {"kill": "a", "when": {"device": "a", "begins": "bakward"}},
            "when.begins",
            "it begins backward, forward",
        ),
        (
            {"kill": "a", "when": {"device": "b", "begins": "forward"}},
            "when.begins",
            "no part in this plan",
        ),
        (
            {"kill": "a", "when": {"device": "a", "event": "recovry"}},
            "when.event",
            "use one of",
        ),
        (
            {"kill": "a", "when": {"device": "a", "event": "send", "batch": 1}},
            "when.batch",
            "has no batch",
        ),
        (
            {"kill": "a", "when": {"device": "a", "begins": "forward", "batch": 5}},
            "when.batch",
            "counted from 0 to 4",
        ),
    ],
)
def test_invalid_fault_is_reported_with_key(fault, key, message):
    (problem,) = problems(
        *faults_in_context(fault), spans_of, events_of(NOTHING), batches=5
    )
    assert ".".join(map(str, problem.key)) == f"faults.0.{key}"
    assert message in problem.text


def test_join_before_departure_is_refused():
    (problem,) = problems(
        *faults_in_context({"join": "a", "at": "3s"}, {"kill": "a", "at": "5s"}),
        spans_of,
        events_of(NOTHING),
    )
    # The device is up at three seconds.
    assert (problem.key, problem.text) == (
        ("faults", 0, "at"),
        "nothing kills or retires 'a' before that: join it later",
    )


def test_trigger_accepts_event_defined_by_method():
    fault = {"kill": "a", "when": {"device": "a", "event": "lap", "batch": 1}}
    (problem,) = problems(*faults_in_context(fault), spans_of, events_of(NOTHING))
    assert "no device records an event 'lap'" in problem.text
    assert problems(*faults_in_context(fault), spans_of, {"lap": ("batch",)}) == []


def test_any_span_is_accepted_if_spans_of_device_are_unknown():
    # None instead of a set means that the spans are unknown.
    fault = {"kill": "a", "when": {"device": "a", "begins": "x"}}
    assert problems(*faults_in_context(fault), lambda _: None, {}) == []


def test_valid_faults_have_no_problems():
    faults = faults_in_context(
        {
            "kill": "a",
            "when": {"device": "a", "begins": "forward", "batch": 4},
            "for": "1s",
        },
        {"partition": [["a"]], "after": "1s"},
        {"heal": "all", "at": "3s"},
        {"kill": "b", "when": {"device": "a", "event": "step", "batch": 1}},
        {"restart": "b", "after": "1s"},
    )
    assert problems(*faults, spans_of, events_of(NOTHING), batches=5) == []


@pytest.mark.parametrize(
    ("fault", "key", "message"),
    [
        (
            {"flap": {**FLAP, "between": ["a", "c"]}},
            ("flap",),
            "there is no link from 'a' to 'c' to flap",
        ),
        (
            {"throttle": {"device": "a", "speed": "1flops"}},
            ("throttle", "speed"),
            "use at least 1kflops",
        ),
        (
            {"unthrottle": "a"},
            ("unthrottle",),
            "no fault of this scenario throttles 'a'",
        ),
        (
            {"degrade": {"between": ["a", "b"], "jitter": "6ms"}},
            ("degrade", "jitter"),
            "a jitter of 6ms is above the delay of 5ms",
        ),
        (
            {"degrade": {"device": "a", "rate": "1kbit"}},
            ("degrade", "rate"),
            "use at least 8kbit",
        ),
        ({"degrade": {"device": "a"}}, ("degrade",), "has no effect"),
    ],
)
def test_invalid_link_or_speed_fault_is_reported(fault, key, message):
    scenario = Scenario.model_validate(
        {
            "name": "small",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {
                "model": {"name": "mlp"},
                "method": {"name": "single"},
                "steps": 1,
            },
            "faults": [{**fault, "at": "1s"}],
        }
    )
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    link = Link(rate=1e6, delay=0.005)
    # There is no link between a and c.
    links = {("a", "b"): link, ("b", "a"): link}
    context = FaultContext(devices, links)
    (problem,) = problems(scenario.faults, context, lambda _: (), events_of(NOTHING))
    assert problem.key == ("faults", 0, *key)
    assert message in problem.text


def obstruction_problem(obstruction):
    """Return the only problem of an obstruction in a scenario with a radio."""
    propagation = Propagation(
        transmit_power=16,
        sensitivity=-82,
        path_loss_exponent=3.2,
        reference_loss=46.68,
        shadowing=8,
    )
    radio = Radio(propagation, {}, packets=None, seed=1)
    _, context = faults_in_context()
    (problem,) = problems(
        parse_faults({"obstruct": obstruction, "at": "1s"}),
        replace(context, radio=radio),
        spans_of,
        events_of(NOTHING),
    )
    return problem


def test_obstruction_requires_exponent_above_radio_exponent():
    problem = obstruction_problem({"device": "a", "path_loss_exponent": 3.2})
    assert problem.key == ("faults", 0, "obstruct", "path_loss_exponent")
    assert "must be above the radio's own exponent, 3.2" in problem.text


def test_obstruction_requires_existing_link():
    problem = obstruction_problem({"between": ["b", "c"], "path_loss_exponent": 6})
    assert problem.key == ("faults", 0, "obstruct")
    assert "there is no link from 'b' to 'c' to obstruct" in problem.text


def test_devices_of_flap_and_throttle_are_listed():
    (flap, throttle) = parse_faults(
        {"flap": {"from": "a", "to": "b", "down": "1s", "up": "1s"}, "at": 0},
        {"throttle": {"device": "c", "slowdown": 2}, "at": 0},
    )
    assert devices_named(flap) == [(("flap", "from"), "a"), (("flap", "to"), "b")]
    assert devices_named(throttle) == [(("throttle", "device"), "c")]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"throttle": {"device": "a"}, "at": 0},
            "exactly one of 'speed' and 'slowdown'",
        ),
        ({"flap": {**FLAP, "times": 2}, "at": 0, "for": "1s"}, "give one of the two"),
        ({"unthrottle": "a", "at": 0, "for": "1s"}, "is a repair and has no duration"),
        (
            {"flap": {"between": ["a", "b"], "down": 0, "up": "1s"}, "at": 0},
            "greater than 0",
        ),
    ],
)
def test_malformed_flap_or_throttle_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        parse_faults(fault)

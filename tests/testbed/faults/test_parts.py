"""Which faults a scenario cannot have."""

from dataclasses import replace

import pytest

from testbed.faults.conditions import FaultContext
from testbed.faults.parts import FaultPart, devices_named, problems
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.network.radio import Propagation, Radio
from testbed.scenario.schema import Scenario
from testbed.trace.metrics_spec import NOTHING, events_of


def faults(*parts):
    return [FaultPart.model_validate(part) for part in parts]


FLAP = {"between": ["a", "b"], "down": "1s", "up": "2s"}


def test_targets_in_words():
    parts = faults(
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


def script(*parts):
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {
                "model": {"name": "mlp"},
                "method": {"name": "single"},
                "steps": 5,
            },
            "faults": list(parts),
            "time_limit": "60s",
        }
    )
    links = {
        ("a", "b"): Link(),
        ("b", "a"): Link(),
        ("a", "c"): Link(),
        ("c", "a"): Link(),
    }
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    return scenario.faults, FaultContext(devices, links, time_limit=60)


def spans(device):
    return {"forward", "backward"} if device == "a" else set()


@pytest.mark.parametrize(
    ("part", "key", "text"),
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
def test_faults_that_cannot_be(part, key, text):
    (problem,) = problems(*script(part), spans, events_of(NOTHING), batches=5)
    assert ".".join(map(str, problem.key)) == f"faults.0.{key}"
    assert text in problem.text


def test_join_before_departure_is_refused():
    (problem,) = problems(
        *script({"join": "a", "at": "3s"}, {"kill": "a", "at": "5s"}),
        spans,
        events_of(NOTHING),
    )
    assert (problem.key, problem.text) == (
        ("faults", 0, "at"),
        "nothing kills or retires 'a' before that: join it later",
    )


def test_a_fault_may_wait_for_an_event_that_the_method_declares():
    fault = {"kill": "a", "when": {"device": "a", "event": "lap", "batch": 1}}
    (unknown,) = problems(*script(fault), spans, events_of(NOTHING))
    assert "no device records an event 'lap'" in unknown.text
    assert problems(*script(fault), spans, {"lap": ("batch",)}) == []
    assert (
        problems(
            *script({"kill": "a", "when": {"device": "a", "begins": "x"}}),
            lambda _: None,
            {},
        )
        == []
    )


def test_possible_faults_have_no_problems():
    fine = script(
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
    assert problems(*fine, spans, events_of(NOTHING), batches=5) == []


@pytest.mark.parametrize(
    ("part", "key", "said"),
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
def test_impossible_faults_of_links_and_speeds(part, key, said):
    scenario = Scenario.model_validate(
        {
            "name": "small",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {
                "model": {"name": "mlp"},
                "method": {"name": "single"},
                "steps": 1,
            },
            "faults": [{**part, "at": "1s"}],
        }
    )
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    link = Link(rate=1e6, delay=0.005)
    links = {("a", "b"): link, ("b", "a"): link}
    (problem,) = problems(
        scenario.faults, FaultContext(devices, links), lambda _: (), events_of(NOTHING)
    )
    assert problem.key == ("faults", 0, *key)
    assert said in problem.text


def test_an_obstruction_raises_the_exponent():
    radio = Radio(Propagation(16, -82, 3.2, 46.68, 8), {}, None, 1)
    _, setting = script()
    for part, key, said in (
        (
            {"device": "a", "path_loss_exponent": 3.2},
            ["path_loss_exponent"],
            "must be above the radio's own exponent, 3.2",
        ),
        (
            {"between": ["b", "c"], "path_loss_exponent": 6},
            [],
            "there is no link from 'b' to 'c' to obstruct",
        ),
    ):
        with_radio = replace(setting, radio=radio)
        (problem,) = problems(
            faults({"obstruct": part, "at": "1s"}),
            with_radio,
            spans,
            events_of(NOTHING),
        )
        assert problem.key == ("faults", 0, "obstruct", *key)
        assert said in problem.text


def test_names_of_the_new_faults_are_looked_at():
    (flap, throttle) = faults(
        {"flap": {"from": "a", "to": "b", "down": "1s", "up": "1s"}, "at": 0},
        {"throttle": {"device": "c", "slowdown": 2}, "at": 0},
    )
    assert devices_named(flap) == [(("flap", "from"), "a"), (("flap", "to"), "b")]
    assert devices_named(throttle) == [(("throttle", "device"), "c")]


@pytest.mark.parametrize(
    ("part", "said"),
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
def test_shapes_of_the_new_faults(part, said):
    with pytest.raises(ValueError, match=said):
        faults(part)

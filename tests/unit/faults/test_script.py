"""The script of faults, without any runtime."""

import pytest

from testbed.faults.checks import Setting, devices_named, problems
from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript, target
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.scenario.schema import Scenario


def faults(*parts):
    return [FaultPart.model_validate(part) for part in parts]


def told(strikes):
    return [(strike.operation, target(strike.part), strike.intended) for strike in strikes]


def test_by_time_with_undo():
    script = FaultScript(faults({"kill": "a", "at": "2s", "for": "3s"}))
    assert script.next_deadline() == 2
    assert script.due(1.9) == []
    (strike,) = script.due(2.5)
    assert told([strike]) == [("kill", "a", 2.0)]
    assert script.next_deadline() is None
    script.done(strike, 2.6)
    (undo,) = script.due(6)
    assert told([undo]) == [("restart", "a", 5.6)]
    assert undo.fields() == {"action": "kill", "target": "a", "phase": "undo", "intended": 5.6}
    script.done(undo, 5.7)
    (record,) = script.records()
    assert (record.intended, record.actual, record.undo_intended, record.undo_actual) == (2.0, 2.6, 5.6, 5.7)


def test_equal_instants_keep_the_order_of_the_file():
    script = FaultScript(faults({"pause": "b", "at": "1s"}, {"kill": "a", "at": "1s"}, {"kill": "c", "at": "0"}))
    assert told(script.due(1)) == [("kill", "c", 0.0), ("pause", "b", 1.0), ("kill", "a", 1.0)]


def test_undo_comes_before_a_later_fault_at_the_same_instant():
    script = FaultScript(faults({"pause": "b", "at": "1s", "for": "1s"}, {"kill": "b", "at": "2s"}))
    script.done(script.due(1)[0], 1.0)
    assert told(script.due(2)) == [("resume", "b", 2.0), ("kill", "b", 2.0)]


def test_after_counts_from_when_the_one_before_took_effect():
    script = FaultScript(
        faults(
            {"kill": "a", "when": {"device": "a", "begins": "backward", "batch": 2}},
            {"restart": "a", "after": "3s"},
            {"kill": "b", "after": "1s"},
        )
    )
    assert script.next_deadline() is None
    (strike,) = script.observe(7.0, "a", "begin", {"span": "backward", "batch": 2, "micro": 0})
    script.done(strike, 7.25)
    (second,) = script.due(20)
    assert told([second]) == [("restart", "a", 10.25)]
    script.done(second, 11.0)
    assert script.next_deadline() == 12.0


@pytest.mark.parametrize(
    ("trigger", "event", "fields", "fires"),
    [
        ({"begins": "forward"}, "begin", {"span": "forward", "batch": 9}, True),
        ({"begins": "forward"}, "begin", {"span": "backward"}, False),
        ({"begins": "forward"}, "compute", {"span": "forward"}, False),
        ({"begins": "forward", "batch": 1, "micro": 2}, "begin", {"span": "forward", "batch": 1, "micro": 2}, True),
        ({"begins": "forward", "batch": 1, "micro": 2}, "begin", {"span": "forward", "batch": 1, "micro": 1}, False),
        ({"event": "recovery"}, "recovery", {"phase": "detected"}, True),
        ({"event": "step", "batch": 3}, "step", {"step": 3}, True),
        ({"event": "step", "batch": 3}, "step", {"step": 2}, False),
    ],
)
def test_triggers(trigger, event, fields, fires):
    script = FaultScript(faults({"kill": "b", "when": {"device": "a", **trigger}}))
    assert script.watched == {"a"}
    assert script.observe(1.0, "b", event, fields) == []
    assert bool(script.observe(1.0, "a", event, fields)) == fires
    assert script.observe(2.0, "a", event, fields) == []
    assert script.watched == (frozenset() if fires else {"a"})


def test_fault_added_to_a_running_lab():
    script = FaultScript()
    script.append(FaultPart.model_validate({"partition": [["a"], ["b", "c"]], "at": "5s", "for": "1s"}))
    (strike,) = script.due(5)
    assert (strike.handle, target(strike.part)) == ("fault-0", "a | b,c")
    script.done(strike, 5)
    assert [(each.operation, each.handle) for each in script.due(6)] == [("undo", "fault-0")]


def test_fault_that_never_struck_is_told_apart():
    script = FaultScript(faults({"kill": "a", "when": {"device": "a", "event": "recovery"}}))
    assert script.records()[0].actual is None


def test_targets_in_words():
    parts = faults(
        {"degrade": {"between": ["a", "b"], "loss": "1%"}, "at": "1s"},
        {"degrade": {"from": "a", "to": "b", "loss": "1%"}, "at": "1s"},
        {"degrade": {"device": "c", "loss": "1%"}, "at": "1s"},
        {"heal": "all", "at": "1s"},
    )
    assert [target(part) for part in parts] == ["a <-> b", "a -> b", "c", "all"]
    assert devices_named(parts[0]) == [(("degrade", "between", 0), "a"), (("degrade", "between", 1), "b")]


def script(*parts):
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 5},
            "faults": list(parts),
            "time_limit": "60s",
        }
    )
    links = {("a", "b"): Link(), ("b", "a"): Link(), ("a", "c"): Link(), ("c", "a"): Link()}
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    return scenario.faults, Setting(devices, links, time_limit=60)


def spans(device):
    return {"forward", "backward"} if device == "a" else set()


@pytest.mark.parametrize(
    ("part", "key", "text"),
    [
        ({"kill": "a", "after": "1s"}, "after", "no fault before"),
        ({"kill": "a", "at": "60s"}, "at", "time_limit"),
        ({"partition": [["a", "b"], ["a"]], "at": "1s"}, "partition", "named twice"),
        ({"partition": [["a", "b", "c"]], "at": "1s"}, "partition", "separates nobody"),
        ({"degrade": {"device": "a"}, "at": "1s"}, "degrade", "changes nothing"),
        ({"degrade": {"device": "a", "preset": "5g"}, "at": "1s"}, "degrade.preset", "no preset '5g'"),
        ({"degrade": {"between": ["b", "c"], "loss": "1%"}, "at": "1s"}, "degrade", "no link"),
        ({"restart": "a", "at": "1s"}, "restart", "no fault of this scenario kills 'a'"),
        ({"kill": "a", "when": {"device": "a", "begins": "bakward"}}, "when.begins", "it begins backward, forward"),
        ({"kill": "a", "when": {"device": "b", "begins": "forward"}}, "when.begins", "no part in this plan"),
        ({"kill": "a", "when": {"device": "a", "event": "recovry"}}, "when.event", "use one of"),
        ({"kill": "a", "when": {"device": "a", "event": "send", "batch": 1}}, "when.batch", "has no batch"),
        ({"kill": "a", "when": {"device": "a", "begins": "forward", "batch": 5}}, "when.batch", "the last one is 4"),
    ],
)
def test_faults_that_cannot_be(part, key, text):
    (problem,) = problems(*script(part), spans, batches=5)
    assert ".".join(map(str, problem.key)) == f"faults.0.{key}"
    assert text in problem.text


def test_possible_faults_have_no_problems():
    fine = script(
        {"kill": "a", "when": {"device": "a", "begins": "forward", "batch": 4}, "for": "1s"},
        {"partition": [["a"]], "after": "1s"},
        {"heal": "all", "at": "3s"},
        {"kill": "b", "when": {"device": "a", "event": "step", "batch": 1}},
        {"restart": "b", "after": "1s"},
    )
    assert problems(*fine, spans, batches=5) == []


def play(script, until, late=0.0):
    """Let a script strike as soon as things are due, each so much late; return (operation, intended)."""
    done = []
    while (deadline := script.next_deadline()) is not None and deadline <= until:
        for strike in script.due(deadline):
            done.append((strike.operation, round(strike.intended, 9)))
            script.done(strike, strike.intended + late)
    return done


FLAP = {"between": ["a", "b"], "down": "1s", "up": "2s"}


def test_flap_goes_down_and_up_so_often():
    script = FaultScript(faults({"flap": {**FLAP, "times": 2}, "at": "5s"}, {"kill": "a", "after": "100s"}))
    turns = [("flap", 5), ("undo", 6), ("flap", 8), ("undo", 9)]
    assert play(script, 1000) == [*turns, ("kill", 105)]
    record = script.records()[0]
    assert (record.target, record.intended, record.actual, record.undo_actual) == ("a <-> b", 5, 5, 9)


def test_flap_does_not_drift():
    script = FaultScript(faults({"flap": {**FLAP, "times": 100}, "at": 0}))
    turns = play(script, 1000, late=0.125)
    assert turns[0] == ("flap", 0)
    assert turns[-1] == ("undo", 0.125 + 99 * 3 + 1)


def test_flap_ends_with_the_links_up():
    script = FaultScript(faults({"flap": FLAP, "at": 0, "for": "3.5s"}))
    assert play(script, 1000) == [("flap", 0), ("undo", 1), ("flap", 3), ("undo", 3.5)]
    without_end = FaultScript(faults({"flap": FLAP, "at": 0}))
    assert len(play(without_end, 3000)) == 2001


def test_heal_ends_a_flap():
    script = FaultScript(faults({"flap": FLAP, "at": 0}, {"heal": "all", "at": "3.5s"}))
    assert play(script, 1000) == [("flap", 0), ("undo", 1), ("flap", 3), ("heal", 3.5)]


def test_throttle_is_undone_by_its_handle():
    script = FaultScript(faults({"throttle": {"device": "a", "slowdown": 4}, "at": "1s", "for": "2s"}))
    assert play(script, 10) == [("throttle", 1), ("undo", 3)]
    assert script.records()[0].target == "a"


@pytest.mark.parametrize(
    ("part", "key", "said"),
    [
        ({"flap": {**FLAP, "between": ["a", "c"]}}, ("flap",), "there is no link from 'a' to 'c' to flap"),
        ({"throttle": {"device": "a", "speed": "1flops"}}, ("throttle", "speed"), "use at least 1kflops"),
        ({"unthrottle": "a"}, ("unthrottle",), "no fault of this scenario throttles 'a'"),
        (
            {"degrade": {"between": ["a", "b"], "jitter": "6ms"}},
            ("degrade", "jitter"),
            "a jitter of 6ms is above the delay of 5ms",
        ),
        ({"degrade": {"device": "a", "rate": "1kbit"}}, ("degrade", "rate"), "use at least 8kbit"),
        ({"degrade": {"device": "a"}}, ("degrade",), "changes nothing"),
    ],
)
def test_impossible_faults_of_links_and_speeds(part, key, said):
    scenario = Scenario.model_validate(
        {
            "name": "small",
            "devices": {"a": {}, "b": {}, "c": {}},
            "workload": {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1},
            "faults": [{**part, "at": "1s"}],
        }
    )
    devices = tuple(DeviceSpec(name, 1e9, 1e9) for name in "abc")
    link = Link(rate=1e6, delay=0.005)
    links = {("a", "b"): link, ("b", "a"): link}
    (problem,) = problems(scenario.faults, Setting(devices, links), lambda _: ())
    assert problem.key == ("faults", 0, *key)
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
        ({"throttle": {"device": "a"}, "at": 0}, "exactly one of 'speed' and 'slowdown'"),
        ({"flap": {**FLAP, "times": 2}, "at": 0, "for": "1s"}, "give one of the two"),
        ({"unthrottle": "a", "at": 0, "for": "1s"}, "takes no 'for'"),
        ({"flap": {"between": ["a", "b"], "down": 0, "up": "1s"}, "at": 0}, "greater than 0"),
    ],
)
def test_shapes_of_the_new_faults(part, said):
    with pytest.raises(ValueError, match=said):
        faults(part)

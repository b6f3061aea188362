"""The script of faults, without any runtime."""

import pytest

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript


def faults(*parts):
    return [FaultPart.model_validate(part) for part in parts]


def described(operations):
    """Return (what is done, to what, when it is intended)."""
    return [(name(each), each.action.target, each.intended) for each in operations]


def name(operation):
    return (
        operation.action.name
        if operation.phase == "strike"
        else f"undo {operation.action.name}"
    )


def test_by_time_with_undo():
    script = FaultScript(faults({"kill": "a", "at": "2s", "for": "3s"}))
    assert script.next_deadline() == 2
    assert script.due(1.9) == []
    (operation,) = script.due(2.5)
    assert described([operation]) == [("kill", "a", 2.0)]
    assert script.next_deadline() is None
    script.done(operation, 2.6)
    (undo,) = script.due(6)
    assert described([undo]) == [("undo kill", "a", 5.6)]
    assert undo.events() == [
        ("fault", {"action": "kill", "target": "a", "phase": "undo", "intended": 5.6})
    ]
    assert str(undo) == "the fault 'undo kill a'"
    script.done(undo, 5.7)
    assert script.next_deadline() is None


def test_equal_instants_keep_the_order_of_the_file():
    script = FaultScript(
        faults(
            {"pause": "b", "at": "1s"},
            {"kill": "a", "at": "1s"},
            {"kill": "c", "at": "0"},
        )
    )
    assert described(script.due(1)) == [
        ("kill", "c", 0.0),
        ("pause", "b", 1.0),
        ("kill", "a", 1.0),
    ]


def test_undo_comes_before_a_later_fault_at_the_same_instant():
    script = FaultScript(
        faults({"pause": "b", "at": "1s", "for": "1s"}, {"kill": "b", "at": "2s"})
    )
    script.done(script.due(1)[0], 1.0)
    assert described(script.due(2)) == [("undo pause", "b", 2.0), ("kill", "b", 2.0)]


def test_after_counts_from_when_the_one_before_took_effect():
    script = FaultScript(
        faults(
            {"kill": "a", "when": {"device": "a", "begins": "backward", "batch": 2}},
            {"restart": "a", "after": "3s"},
            {"kill": "b", "after": "1s"},
        )
    )
    assert script.next_deadline() is None
    (operation,) = script.observe(
        7.0, "a", "begin", {"span": "backward", "batch": 2, "micro": 0}
    )
    script.done(operation, 7.25)
    (second,) = script.due(20)
    assert described([second]) == [("restart", "a", 10.25)]
    script.done(second, 11.0)
    assert script.next_deadline() == 12.0


@pytest.mark.parametrize(
    ("trigger", "event", "fields", "fires"),
    [
        ({"begins": "forward"}, "begin", {"span": "forward", "batch": 9}, True),
        ({"begins": "forward"}, "begin", {"span": "backward"}, False),
        ({"begins": "forward"}, "compute", {"span": "forward"}, False),
        (
            {"begins": "forward", "batch": 1, "micro": 2},
            "begin",
            {"span": "forward", "batch": 1, "micro": 2},
            True,
        ),
        (
            {"begins": "forward", "batch": 1, "micro": 2},
            "begin",
            {"span": "forward", "batch": 1, "micro": 1},
            False,
        ),
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


def play(script, until, late=0.0):
    """Let a script operation as soon as things are due, each so much late; return (operation, intended)."""
    done = []
    while (deadline := script.next_deadline()) is not None and deadline <= until:
        for operation in script.due(deadline):
            done.append((name(operation), round(operation.intended, 9)))
            script.done(operation, operation.intended + late)
    return done


FLAP = {"between": ["a", "b"], "down": "1s", "up": "2s"}


def test_flap_goes_down_and_up_so_often():
    script = FaultScript(
        faults(
            {"flap": {**FLAP, "times": 2}, "at": "5s"}, {"kill": "a", "after": "100s"}
        )
    )
    turns = [("flap", 5), ("undo flap", 6), ("flap", 8), ("undo flap", 9)]
    assert play(script, 1000) == [*turns, ("kill", 105)]


def test_flap_does_not_drift():
    script = FaultScript(faults({"flap": {**FLAP, "times": 100}, "at": 0}))
    turns = play(script, 1000, late=0.125)
    assert turns[0] == ("flap", 0)
    assert turns[-1] == ("undo flap", 0.125 + 99 * 3 + 1)


def test_flap_ends_with_the_links_up():
    script = FaultScript(faults({"flap": FLAP, "at": 0, "for": "3.5s"}))
    assert play(script, 1000) == [
        ("flap", 0),
        ("undo flap", 1),
        ("flap", 3),
        ("undo flap", 3.5),
    ]
    without_end = FaultScript(faults({"flap": FLAP, "at": 0}))
    assert len(play(without_end, 3000)) == 2001


def test_heal_ends_a_flap():
    script = FaultScript(faults({"flap": FLAP, "at": 0}, {"heal": "all", "at": "3.5s"}))
    assert play(script, 1000) == [
        ("flap", 0),
        ("undo flap", 1),
        ("flap", 3),
        ("heal", 3.5),
    ]


def test_throttle_is_undone_by_its_handle():
    script = FaultScript(
        faults({"throttle": {"device": "a", "slowdown": 4}, "at": "1s", "for": "2s"})
    )
    assert play(script, 10) == [("throttle", 1), ("undo throttle", 3)]


def test_link_down_during_heal_comes_up_at_once():
    script = FaultScript(faults({"flap": FLAP, "at": 0}, {"heal": "all", "at": "3s"}))
    (first,) = script.due(0)
    script.done(first, 0)
    (up,) = script.due(1)
    script.done(up, 1)
    again, heal = script.due(3)
    script.done(heal, 3.1)
    script.done(again, 3.2)
    assert described(script.due(10)) == [("undo flap", "a <-> b", 3.2)]
    assert script.next_deadline() is None


def test_pending_and_running_operations_may_start_a_device() -> None:
    script = FaultScript(
        faults(
            {"kill": "a", "at": "1s"},
            {"restart": "a", "at": "3s"},
            {"kill": "b", "at": "4s"},
        )
    )
    (kill,) = script.due(1)
    script.done(kill, 1)
    assert script.may_start("a")
    (restart,) = script.due(3)
    assert script.may_start("a")
    script.done(restart, 3)
    assert not script.may_start("a")
    assert not script.may_start("b")


def test_the_end_of_a_kill_starts_its_device_and_the_end_of_a_pause_does_not() -> None:
    script = FaultScript(
        faults(
            {"kill": "a", "at": "1s", "for": "2s"},
            {"pause": "b", "at": "1s", "for": "2s"},
        )
    )
    assert script.may_start("a")
    for operation in script.due(1):
        script.done(operation, 1)
    assert script.may_start("a")
    assert not script.may_start("b")
    for operation in script.due(3):
        script.done(operation, 3)
    assert not script.may_start("a")

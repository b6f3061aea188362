"""The schedule of the faults of a scenario."""

import pytest

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript

FLAP = {"between": ["a", "b"], "down": "1s", "up": "2s"}


def make_script(*faults):
    return FaultScript([FaultPart.model_validate(fault) for fault in faults])


def summarize(operations):
    """Return (name, target, intended time) of each operation."""
    summary = []
    for operation in operations:
        name = name_operation(operation)
        summary.append((name, operation.action.target, operation.intended))
    return summary


def name_operation(operation):
    undo = "undo " if operation.phase == "undo" else ""
    return undo + operation.action.name


def run_script(script, until, latency=0.0):
    """Report each operation as done a latency after the intended time; return (operation, intended time)."""
    operations = []
    deadline = script.next_deadline()
    while deadline is not None and deadline <= until:
        for operation in script.pop_due(deadline):
            # Times are sums of decimal fractions, which binary floats round.
            intended = round(operation.intended, 9)
            operations.append((name_operation(operation), intended))
            script.complete(operation, operation.intended + latency)
        deadline = script.next_deadline()
    return operations


def test_duration_counts_from_actual_time_of_fault():
    script = make_script({"kill": "a", "at": "2s", "for": "3s"})
    assert script.next_deadline() == 2
    assert script.pop_due(1.9) == []
    (operation,) = script.pop_due(2.5)
    assert summarize([operation]) == [("kill", "a", 2.0)]
    assert script.next_deadline() is None
    # The kill took effect 0.6 s late, and so will its end.
    script.complete(operation, 2.6)
    (undo,) = script.pop_due(6)
    assert summarize([undo]) == [("undo kill", "a", 5.6)]
    assert undo.events() == [
        ("fault", {"action": "kill", "target": "a", "phase": "undo", "intended": 5.6})
    ]
    # Error messages contain this text.
    assert str(undo) == "the fault 'undo kill a'"
    script.complete(undo, 5.7)
    assert script.next_deadline() is None


def test_simultaneous_faults_keep_order_of_file():
    script = make_script(
        {"pause": "b", "at": "1s"},
        {"kill": "a", "at": "1s"},
        {"kill": "c", "at": "0"},
    )
    assert summarize(script.pop_due(1)) == [
        ("kill", "c", 0.0),
        ("pause", "b", 1.0),
        ("kill", "a", 1.0),
    ]


def test_undo_precedes_later_fault_of_file_at_same_time():
    script = make_script(
        {"pause": "b", "at": "1s", "for": "1s"}, {"kill": "b", "at": "2s"}
    )
    script.complete(script.pop_due(1)[0], 1.0)
    assert summarize(script.pop_due(2)) == [
        ("undo pause", "b", 2.0),
        ("kill", "b", 2.0),
    ]


def test_after_counts_from_actual_time_of_previous_fault():
    script = make_script(
        {"kill": "a", "when": {"device": "a", "begins": "backward", "batch": 2}},
        {"restart": "a", "after": "3s"},
        {"kill": "b", "after": "1s"},
    )
    assert script.next_deadline() is None
    (operation,) = script.observe(
        7.0, "a", "begin", {"span": "backward", "batch": 2, "micro": 0}
    )
    script.complete(operation, 7.25)
    (second,) = script.pop_due(20)
    assert summarize([second]) == [("restart", "a", 10.25)]
    script.complete(second, 11.0)
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
def test_trigger_fires_once_on_matching_event(trigger, event, fields, fires):
    script = make_script({"kill": "b", "when": {"device": "a", **trigger}})
    assert script.watched_devices == {"a"}
    assert script.observe(1.0, "b", event, fields) == []
    assert bool(script.observe(1.0, "a", event, fields)) == fires
    assert script.observe(2.0, "a", event, fields) == []
    assert script.watched_devices == (frozenset() if fires else {"a"})


def test_flap_repeats_given_number_of_times():
    script = make_script(
        {"flap": {**FLAP, "times": 2}, "at": "5s"}, {"kill": "a", "after": "100s"}
    )
    turns = [("flap", 5), ("undo flap", 6), ("flap", 8), ("undo flap", 9)]
    assert run_script(script, until=1000) == [*turns, ("kill", 105)]


def test_late_flap_turns_do_not_delay_later_turns():
    script = make_script({"flap": {**FLAP, "times": 100}, "at": 0})
    turns = run_script(script, until=1000, latency=0.125)
    assert turns[0] == ("flap", 0)
    # Turns count from the actual time of the first strike: its latency appears once, not a hundred times.
    assert turns[-1] == ("undo flap", 0.125 + 99 * 3 + 1)


def test_flap_is_undone_at_end_of_duration():
    script = make_script({"flap": FLAP, "at": 0, "for": "3.5s"})
    assert run_script(script, until=1000) == [
        ("flap", 0),
        ("undo flap", 1),
        ("flap", 3),
        ("undo flap", 3.5),
    ]


def test_flap_without_duration_repeats_until_end_of_run():
    script = make_script({"flap": FLAP, "at": 0})
    # 1,000 cycles of three seconds have two operations each; the strike at 3000 s follows.
    assert len(run_script(script, until=3000)) == 2001


def test_heal_cancels_remaining_turns_of_flap():
    script = make_script({"flap": FLAP, "at": 0}, {"heal": "all", "at": "3.5s"})
    assert run_script(script, until=1000) == [
        ("flap", 0),
        ("undo flap", 1),
        ("flap", 3),
        ("heal", 3.5),
    ]


def test_throttle_is_undone_after_duration():
    script = make_script(
        {"throttle": {"device": "a", "slowdown": 4}, "at": "1s", "for": "2s"}
    )
    assert run_script(script, until=10) == [("throttle", 1), ("undo throttle", 3)]


def test_flap_striking_during_heal_is_undone_at_once():
    script = make_script({"flap": FLAP, "at": 0}, {"heal": "all", "at": "3s"})
    (first_strike,) = script.pop_due(0)
    script.complete(first_strike, 0)
    (first_undo,) = script.pop_due(1)
    script.complete(first_undo, 1)
    second_strike, heal = script.pop_due(3)
    # Both operations run at the same time, and the strike finishes last.
    script.complete(heal, 3.1)
    script.complete(second_strike, 3.2)
    assert summarize(script.pop_due(10)) == [("undo flap", "a <-> b", 3.2)]
    assert script.next_deadline() is None


def test_device_may_start_while_restart_is_pending_or_running() -> None:
    script = make_script(
        {"kill": "a", "at": "1s"},
        {"restart": "a", "at": "3s"},
        {"kill": "b", "at": "4s"},
    )
    (kill,) = script.pop_due(1)
    script.complete(kill, 1)
    assert script.has_pending_start("a")
    (restart,) = script.pop_due(3)
    # The restart has been handed out, and is not done yet.
    assert script.has_pending_start("a")
    script.complete(restart, 3)
    assert not script.has_pending_start("a")
    assert not script.has_pending_start("b")


def test_device_may_start_at_end_of_kill_but_not_of_pause() -> None:
    script = make_script(
        {"kill": "a", "at": "1s", "for": "2s"},
        {"pause": "b", "at": "1s", "for": "2s"},
    )
    assert script.has_pending_start("a")
    for operation in script.pop_due(1):
        script.complete(operation, 1)
    assert script.has_pending_start("a")
    assert not script.has_pending_start("b")
    for operation in script.pop_due(3):
        script.complete(operation, 3)
    assert not script.has_pending_start("a")

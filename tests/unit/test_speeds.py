"""What throttles and a trace do to devices' speeds."""

import pytest

from testbed.faults.parts import ThrottlePart
from testbed.faults.speeds import Speeds
from testbed.hardware import DeviceSpec

OWN = Speeds.of([DeviceSpec("a", 1e9, 1e9), DeviceSpec("b", 2e9, 1e9)])


def throttle(**keys):
    return ThrottlePart.model_validate({"device": "a", **keys})


def test_throttles_pile_up_and_go_by_their_handles():
    half = OWN.throttle(throttle(slowdown=2), "x")
    assert half.changed(OWN) == {"a": 0.5}
    fixed = half.throttle(throttle(speed="100mflops"), "y")
    slower = fixed.throttle(throttle(slowdown=4), "z")
    assert (fixed.factor("a"), slower.factor("a")) == (0.1, 0.025)
    assert slower.speed("a") == pytest.approx(25e6)
    assert slower.speed("b") == 2e9
    assert slower.undo("y").factor("a") == 0.125
    assert slower.undo("x").changed(slower) == {}
    assert slower.unthrottle("a").changed(slower) == {"a": 1.0}
    assert slower.unthrottle("b") == slower
    assert OWN.undo("never") == OWN
    with pytest.raises(ValueError, match="'x' is in force already"):
        half.throttle(throttle(slowdown=3), "x")


def test_trace_stands_below_throttles():
    traced = OWN.set("a", 0.5)
    both = traced.throttle(throttle(slowdown=2), "x")
    assert traced.changed(OWN) == {"a": 0.5}
    assert both.factor("a") == 0.25
    assert both.set("a", 1.5).undo("x").factor("a") == 1.5
    assert both.throttle(throttle(speed="1gflops"), "y").set("a", 0.1).changed(both) == {"a": 1.0}

"""Conditions on the figures of a run, as ``expect`` in a scenario states them: they decide the exit status.

A condition is a comparison (``>= 0.9``, ``== 1``, ``< 60s``, ``== true``) or a tolerance (``within 10% of 0.25s``).
Figures that are times or sizes are compared with written units, shares with a number or per cent.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.formats import Kind
from testbed.quantities import parse_duration, parse_fraction, parse_size

FIGURES: dict[str, tuple[Kind, str]] = {
    "accuracy": ("share", "of the test data, at the last evaluation"),
    "test_loss": ("number", "on the test data, at the last evaluation"),
    "loss": ("number", "training loss of the last step"),
    "loss_first": ("number", "training loss of the first step"),
    "steps": ("number", "training steps done, each counted once"),
    "steps_repeated": ("number", "training steps done again after a recovery"),
    "samples": ("number", "training samples of the steps, each step counted once"),
    "duration": ("seconds", "from the start of the workload to the end of the lead's program"),
    "samples_per_second": ("number", "samples over duration"),
    "step_time": ("seconds", "median over the undisturbed steps"),
    "step_time_mean": ("seconds", "mean over the undisturbed steps"),
    "step_time_p95": ("seconds", "95th percentile over the undisturbed steps"),
    "steady_steps": ("number", "undisturbed steps"),
    "predicted_step_time": ("seconds", "what the planner predicted"),
    "faults": ("number", "faults that struck, without those that mend"),
    "recoveries": ("number", "faults that the method noticed and outlived"),
    "unrecovered": ("number", "faults that the method noticed and did not outlive"),
    "recovery_time": ("seconds", "longest, from the strike to the resumption"),
    "detection_time": ("seconds", "longest, from the strike to the detection"),
    "resume_time": ("seconds", "longest, from the detection to the resumption"),
    "repartition_time": ("seconds", "longest, from the detection to the decision who goes on with what"),
    "redistribution_time": ("seconds", "longest, from that decision until all devices have what they need"),
    "first_batch_time": ("seconds", "longest, from the detection until the first batch after it was trained"),
    "recovery_bytes": ("bytes", "weights and optimizer state that recoveries moved"),
    "repartitions": ("number", "changes of the partition in a run that goes on, without those of recoveries"),
    "repartition_pause": ("seconds", "longest that such a change let no batch in, draining included"),
    "repartition_draining": ("seconds", "of that pause, until the pipeline was empty"),
    "repartition_moving": ("seconds", "longest that such a change took from then on: agreeing and moving"),
    "repartition_bytes": ("bytes", "weights and optimizer state that such changes moved"),
    "versions_kept": ("number", "of its weights, that any stage kept at once"),
    "step_time_before": ("seconds", "median over the undisturbed steps before the first fault that was noticed"),
    "step_time_after": ("seconds", "median over those after the last recovery or repartition, if any"),
    "busiest_share": ("share", "of their time, that the busiest device computes or the busiest link carries"),
    "requests": ("number", "inferences done"),
    "requests_per_second": ("number", "inferences over duration"),
    "objects": ("number", "objects found in the samples of all requests"),
    "latency": ("seconds", "median of an inference"),
    "latency_mean": ("seconds", "mean of an inference"),
    "latency_p95": ("seconds", "95th percentile of an inference"),
    "latency_p99": ("seconds", "99th percentile of an inference"),
    "latency_max": ("seconds", "longest inference"),
    "requests_failed": ("number", "inferences given up"),
    "path_compute": ("seconds", "of computing on an inference's critical path, mean"),
    "path_network": ("seconds", "of messages on an inference's critical path, mean"),
    "over_predicted": ("number", "time from one inference's result to the next, over the predicted one"),
    "over_bound": ("number", "time of all inferences over that of the busiest processor or link; 1 is the least"),
    "casts": ("number", "transmissions to several at once, by all devices together"),
    "cast_time": ("seconds", "median time that a cast took to leave its device"),
    "reception": ("share", "of the casts meant to be heard, each counted for each of its peers"),
    "messages": ("number", "sent, by all devices together"),
    "bytes_sent": ("bytes", "by all devices together"),
    "bytes_received": ("bytes", "by all devices together"),
    "compute_share": ("share", "of the duration, mean over the devices of the plan"),
    "idle_share": ("share", "of the duration, mean over the devices of the plan"),
    "compute_deficit": ("seconds", "by which the host made computations late, over all devices"),
    "deficit_share": ("share", "of the undisturbed steps' time, of the worst device"),
    "host_share": ("share", "of the undisturbed steps' or requests' time, that the host added to their critical paths"),
    "trusted": ("bool", "whether the verdict holds nothing against the run"),
    "status": ("text", "finished, failed, timed out or interrupted"),
}
"""The figures of metrics.json that a condition may name, each with what it is."""

_SPENT = ("compute", "send", "receive", "communicate", "down", "idle")
DEVICE_FIGURES: dict[str, Kind] = {
    **dict.fromkeys([*_SPENT, "busy", "deficit"], "seconds"),
    **dict.fromkeys([*(f"{name}_share" for name in _SPENT), "deficit_share", "waited_share"], "share"),
    **dict.fromkeys(["bytes_sent", "bytes_received", "weights", "activations"], "bytes"),
    **dict.fromkeys(["messages_sent", "messages_received", "flops"], "number"),
}
"""The figures of one device, named in a condition as ``devices.<device>.<figure>``."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)\s*(\S.*)")
_TOLERANCE = re.compile(r"within\s+(\S+)\s+of\s+(\S.*)")


@dataclass(frozen=True)
class Condition:
    """What one figure has to fulfil."""

    operator: str
    """One of >= <= > < == != within."""
    target: float | str | bool
    """In base units."""
    tolerance: float = 0.0
    """Of ``within``: a fraction of the target."""

    def holds(self, value: object) -> bool:
        """Say whether a figure fulfils the condition; one that is absent or no number never does."""
        if isinstance(self.target, str | bool):
            return type(value) is type(self.target) and _COMPARE[self.operator](value, self.target)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return False
        if self.operator == "within":
            return abs(value - self.target) <= self.tolerance * abs(self.target)
        return _COMPARE[self.operator](value, self.target)


@dataclass(frozen=True)
class Expectation:
    """A condition and what became of it."""

    key: str
    condition: str
    value: Any
    """The figure; None where the run gave none."""
    holds: bool


def kind_of(figure: str) -> Kind:
    """Return what a figure is measured in; KeyError where there is no such figure."""
    if figure in FIGURES:
        return FIGURES[figure][0]
    head, _, figure_of_device = figure.rpartition(".")
    if not re.fullmatch(r"devices\.[^.]+", head):
        raise KeyError(figure)
    return DEVICE_FIGURES[figure_of_device]


def parse_condition(text: str, kind: Kind) -> Condition:
    """Read a condition on a figure of that kind; raise ValueError saying what would be right."""
    if match := _TOLERANCE.fullmatch(text.strip()):
        if kind in ("bool", "text"):
            raise ValueError(f"'{text}' asks for a tolerance, which this figure cannot have: write '== ...'")
        return Condition("within", parse_target(match[2], kind), parse_fraction(match[1]))
    match = _COMPARISON.fullmatch(text.strip())
    if not match:
        raise ValueError(f"'{text}' is not a condition: write one such as '>= 0.9', '== 1', or 'within 10% of 0.25s'")
    if kind in ("bool", "text") and match[1] not in ("==", "!="):
        raise ValueError(f"'{text}' compares by size what has none: write '== ...'")
    return Condition(match[1], parse_target(match[2], kind))


def parse_target(text: str, kind: Kind) -> float | str | bool:
    """Read a figure of that kind in base units; raise ValueError saying what would be right."""
    text = text.strip()
    if kind == "seconds":
        return parse_duration(text)
    if kind == "bytes":
        return parse_size(text)
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"'{text}' is neither true nor false")
        return text == "true"
    if kind == "text":
        return text
    if kind == "share" and text.endswith("%"):
        return parse_fraction(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"'{text}' is not a finite number")
    return number


def look_up(tree: object, dotted: str) -> Any:
    """Return what lies at a dotted key of mappings, and lists by their index; None where there is nothing."""
    for part in dotted.split("."):
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def evaluate(expect: Mapping[str, str], metrics: Mapping[str, Any]) -> list[Expectation]:
    """Return each condition with the figure it is about and whether it holds, in the order of the scenario."""
    results = []
    for key, text in expect.items():
        value = look_up(metrics, key)
        results.append(Expectation(key, text, value, parse_condition(text, kind_of(key)).holds(value)))
    return results

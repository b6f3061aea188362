"""What must be true of any run, whatever its scenario: the oracles.

Each takes what happened and yields violations, one line each, that begin with a word for their kind. None of them reads
a figure without computing it again from the events by itself.
"""

from __future__ import annotations

import json
import math
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.preparation import part_of
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed.validation import find_method
from testbed.wire import arrays
from testbed_controller.api import build
from tools.stress.generate import COLLABORATIVE, LOSSLESS, SYNCHRONOUS, Tree

LONGEST = 120
"""Seconds of this host's time that a run of a few steps may take before it counts as hanging."""
GAVE_UP = (
    "not enough devices",
    "is left",
    "no device",
    "cannot hold",
    "lost",
    "are needed",
    "too few",
)
"""Words by which a method says that the devices which are there cannot go on: its right, under faults."""


class HangError(Exception):
    """A run takes longer than any could."""


def violations(tree: Tree, repeat: bool = False) -> list[str]:
    """Run a scenario on the virtual clock and return what must not be; ``["refused: ..."]`` where it is no scenario."""
    return held_against(tree, partial(_on_the_virtual_clock, tree, repeat), LONGEST)


def held_against(
    tree: Tree, oracles: Callable[[Prepared], Iterable[str]], longest: int
) -> list[str]:
    """Prepare a scenario and return what its oracles yield in ``longest`` seconds, or that they took longer."""
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(longest)
    try:
        try:
            (trial,) = trials(build(**json.loads(json.dumps(tree))))
            prepared = prepare(trial)
        except InputError as refused:
            return [f"refused: {refused}"]
        return list(oracles(prepared))
    except HangError:
        return [f"hang: not over after {longest} s of this host's time"]
    except Exception:  # noqa: BLE001  (whatever it is, it is what is looked for)
        return ["traceback: " + one_line(traceback.format_exc())]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def one_line(text: str) -> str:
    """Return the end of a traceback as one line."""
    return text.strip().replace("\n", " | ")[-600:]


def _too_long(*_: object) -> None:
    raise HangError


def _on_the_virtual_clock(
    tree: Tree, repeat: bool, prepared: Prepared
) -> Iterator[str]:
    outcome = run(prepared)
    yield from of_any_run(prepared, outcome)
    if repeat:
        yield from repeats(outcome, run(prepared))
        yield from as_undivided(tree, outcome)


def of_any_run(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield what must not be of any run, on either clock."""
    yield from ended(prepared, outcome)
    yield from every_step(prepared, outcome)
    yield from same_figures(prepared, outcome)


def run(prepared: Prepared) -> Outcome:
    """Simulate a trial."""
    return simulate(prepared, load(part_of(prepared.scenario).data))


def ended(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield how a run ended that did not end as it should."""
    error = outcome.error or ""
    if "Traceback" in error:
        yield "traceback: " + one_line(error)
    elif outcome.status == "timed out":
        yield f"hang: {error[:300]}"
    elif outcome.status == "failed":
        faults = bool(prepared.scenario.faults)
        if not (faults and any(word in error for word in GAVE_UP)):
            yield f"failed: {error[:300]}"


def expected_steps(prepared: Prepared) -> int | None:
    """Return how many steps a run that says finished has recorded; None where the method may leave some out."""
    workload = part_of(prepared.scenario)
    if workload.method.name not in LOSSLESS or workload.steps is None:
        return None
    if workload.method.name in COLLABORATIVE:
        return math.ceil(
            workload.steps / (workload.method.options().get("local_steps") or 1)
        )
    return workload.steps


def every_step(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield the steps, evaluations and requests that a finished run has not, or has too often."""
    if outcome.status != "finished":
        return
    expected = expected_steps(prepared)
    if expected is not None:
        found = Counter(
            event.fields["step"] for event in outcome.events if event.event == "step"
        )
        numbers = sorted(found)
        if len(numbers) != expected:
            yield f"steps: {len(numbers)} of {expected} are recorded: {numbers}"
        recoveries = any(
            event.event in ("recovery", "fault") for event in outcome.events
        )
        if not recoveries and any(count > 1 for count in found.values()):
            yield f"steps: some are recorded more than once though nothing failed: {found.most_common(3)}"
    requests = part_of(prepared.scenario).requests
    if prepared.scenario.workload.task == "infer" and requests is not None:
        done = Counter(
            event.fields["request"]
            for event in outcome.events
            if event.event in ("request", "failed")
        )
        again = any(
            event.event == "fault" for event in outcome.events
        )  # a source that boots asks all of them again
        if sorted(done) != list(range(requests)) or (
            not again and any(count > 1 for count in done.values())
        ):
            yield f"requests: {requests} were asked for, answered or given up are {sorted(done.elements())}"


def same_figures(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield figures that are not what the lines of events say, read back and added up here."""
    declared = find_method(prepared.scenario).declared
    figures = metrics(outcome, prepared.experiment, prepared.plan, declared)
    lines = [json.loads(event.to_json()) for event in outcome.events]
    last_evaluation = next(
        (line for line in reversed(lines) if line["event"] == "evaluate"), None
    )
    if last_evaluation is not None and figures.get("accuracy") != last_evaluation.get(
        "accuracy"
    ):
        yield f"figures: accuracy {figures.get('accuracy')}, the last evaluation says {last_evaluation.get('accuracy')}"
    struck = sum(
        line["event"] == "fault" and line["phase"] == "strike" for line in lines
    )
    if struck != sum(
        fault.get("phase", "strike") == "strike" for fault in figures["fault_list"]
    ):
        yield f"figures: {len(figures['fault_list'])} faults, but {struck} struck"
    for name, value in figures.items():
        if (
            isinstance(value, float)
            and value < 0
            and name not in ("loss", "accuracy_risen")
        ):
            yield f"figures: {name} is {value}"
    if any(
        later["time"] < earlier["time"] - 1e-9 for earlier, later in _of_device(lines)
    ):
        yield "figures: events of one device are not in the order of time"


def _of_device(
    lines: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    last: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["device"] in last:
            yield last[line["device"]], line
        last[line["device"]] = line


def repeats(first: Outcome, second: Outcome) -> Iterator[str]:
    """Yield where two runs of one scenario differ."""
    if (first.status, first.error) != (second.status, second.error):
        yield f"repetition: {first.status} ({first.error}), then {second.status} ({second.error})"
    for number, (one, other) in enumerate(
        zip(first.events, second.events, strict=False)
    ):
        if (first_line := one.to_json()) != (second_line := other.to_json()):
            yield f"repetition: event {number} differs: {first_line[:150]} / {second_line[:150]}"
            return
    if len(first.events) != len(second.events):
        yield f"repetition: {len(first.events)} events, then {len(second.events)}"
    if first.weights_file != second.weights_file:
        yield "repetition: the weights differ"


def as_undivided(tree: Tree, outcome: Outcome) -> Iterator[str]:
    """Yield weights that are not those of the undivided model, where a method computes the same whatever happens."""
    work = tree["workload"]
    if work["method"]["name"] not in SYNCHRONOUS or outcome.status != "finished":
        return
    alone = {**tree, "faults": [], "workload": {**work, "method": {"name": "single"}}}
    (trial,) = trials(build(**json.loads(json.dumps(alone))))
    yield from same_weights(run(prepare(trial)), outcome, "the undivided model's")


def same_weights(expected: Outcome, found: Outcome, whose: str) -> Iterator[str]:
    """Yield the first tensor that differs by more than rounding between the weights that two runs have left."""
    right, seen = weights(expected), weights(found)
    for name, tensor in right.items():
        if not torch.allclose(seen[name], tensor, rtol=1e-4, atol=1e-5):
            yield f"weights: {name} is {float((seen[name] - tensor).abs().max()):.3g} from {whose}"
            return


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Return the weights that a run has left, by name."""
    return arrays.unpack(outcome.weights_file or b"")

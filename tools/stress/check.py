"""Oracles: conditions that every run of every scenario must meet.

A scenario is a tree of values as in a file, and has exactly one trial here: neither a sweep nor repetitions. A run of
the trial has an outcome: status, events and final weights. An oracle examines an outcome and yields violations: one
line each, beginning with the kind of violation. The accuracy and the number of faults are recomputed from the events,
independently of the testbed's own code. `tools.stress.generate` groups the methods by the conditions that they meet.
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
from testbed.ml.preparation import workload_section
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Trial
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed.validation import find_method
from testbed.wire import arrays
from testbed_controller.api import build
from tools.stress.generate import COLLABORATIVE, LOSSLESS, SYNCHRONOUS, Tree

HANG_SECONDS = 120
"""Seconds of real time after which a run of a few steps counts as hanging."""
GAVE_UP_TEXTS = (
    "not enough devices",
    "is left",
    "no device",
    "cannot hold",
    "lost",
    "are needed",
    "too few",
)
"""Words in the error of a method that cannot continue with the remaining devices, which is correct under faults.

Each method words this error itself, so the words are general. They excuse no run without faults, and no traceback.
"""


class HangError(Exception):
    """Raised when a run takes longer than the limit."""


def find_violations(tree: Tree, *, compare: bool = False) -> list[str]:
    """Simulate a scenario and return the violations; ``["refused: ..."]`` for an invalid scenario.

    With ``compare``, the outcome is also compared with a second run, and with training of the undivided model.
    """
    oracles = partial(_check_simulation, tree, compare)
    return apply_oracles(tree, oracles, HANG_SECONDS)


def apply_oracles(
    tree: Tree, oracles: Callable[[Prepared], Iterable[str]], hang_seconds: int
) -> list[str]:
    """Prepare a scenario, apply oracles, which run the scenario, and return the violations.

    Preparation and oracles that are not finished after ``hang_seconds`` of real time count as a hang.
    """
    previous_handler = signal.signal(signal.SIGALRM, _raise_hang)
    signal.alarm(hang_seconds)
    try:
        try:
            prepared = prepare(_make_trial(tree))
        except InputError as refused:
            return [f"refused: {refused}"]
        # A list, so that all oracles run before the alarm is switched off.
        return list(oracles(prepared))
    except HangError:
        return [f"hang: not finished after {hang_seconds} s of real time"]
    except Exception:  # noqa: BLE001 - an unexpected exception of any kind is a violation
        return ["traceback: " + one_line(traceback.format_exc())]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)


def _make_trial(tree: Tree) -> Trial:
    # Parts of a random tree may be one and the same list. A file has no such parts, nor has a copy through JSON.
    copied = json.loads(json.dumps(tree))
    (trial,) = trials(build(**copied))
    return trial


def one_line(text: str) -> str:
    """Return the end of a traceback as one line."""
    return text.strip().replace("\n", " | ")[-600:]


def _raise_hang(*_: object) -> None:
    raise HangError


def _check_simulation(tree: Tree, compare: bool, prepared: Prepared) -> Iterator[str]:
    outcome = simulate_trial(prepared)
    yield from check_run(prepared, outcome)
    if compare:
        yield from check_repetition(outcome, simulate_trial(prepared))
        yield from compare_with_undivided(tree, outcome)


def check_run(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield the violations of a run on the virtual clock or in containers."""
    yield from check_end(prepared, outcome)
    yield from check_steps(prepared, outcome)
    yield from check_metrics(prepared, outcome)


def simulate_trial(prepared: Prepared) -> Outcome:
    """Load the data of a trial and simulate the trial."""
    return simulate(prepared, load(workload_section(prepared.scenario).data))


def check_end(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield a violation if a run crashed, hung, or failed without a good reason."""
    error = outcome.error or ""
    if "Traceback" in error:
        yield "traceback: " + one_line(error)
    elif outcome.status == "timed out":
        yield f"hang: {error[:300]}"
    elif outcome.status == "failed":
        has_given_up = any(text in error for text in GAVE_UP_TEXTS)
        if not (prepared.scenario.faults and has_given_up):
            yield f"failed: {error[:300]}"


def expected_steps(prepared: Prepared) -> int | None:
    """Return the number of steps in the events of a finished run; None for methods that may leave steps unfinished."""
    workload = workload_section(prepared.scenario)
    if workload.method.name not in LOSSLESS or workload.steps is None:
        return None
    if workload.method.name not in COLLABORATIVE:
        return workload.steps
    # These methods train in rounds of ``local_steps`` steps, and record each round as one step.
    local_steps = workload.method.options().get("local_steps") or 1
    return math.ceil(workload.steps / local_steps)


def check_steps(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield violations for a wrong number of steps, missing requests, and repetitions in a finished run."""
    if outcome.status != "finished":
        return
    expected = expected_steps(prepared)
    if expected is not None:
        yield from _check_step_numbers(outcome, expected)
    requests = workload_section(prepared.scenario).requests
    if prepared.scenario.workload.task == "infer" and requests is not None:
        yield from _check_request_numbers(outcome, requests)


def _check_step_numbers(outcome: Outcome, expected: int) -> Iterator[str]:
    counts = _count_values(outcome, "step", ("step",))
    numbers = sorted(counts)
    if len(numbers) != expected:
        yield f"steps: {len(numbers)} of {expected} are recorded: {numbers}"
    # After a failure, a pipeline repeats the steps since its last checkpoint.
    if _has_event(outcome, "recovery") or _has_event(outcome, "fault"):
        return
    if any(count > 1 for count in counts.values()):
        yield f"steps: some are recorded more than once although nothing failed: {counts.most_common(3)}"


def _check_request_numbers(outcome: Outcome, requests: int) -> Iterator[str]:
    counts = _count_values(outcome, "request", ("request", "failed"))
    is_complete = sorted(counts) == list(range(requests))
    has_repeated = any(count > 1 for count in counts.values())
    # A coordinator that boots again repeats all requests.
    may_repeat = _has_event(outcome, "fault")
    if not is_complete or (has_repeated and not may_repeat):
        yield f"requests: {requests} expected; answered or given up: {sorted(counts.elements())}"


def _count_values(outcome: Outcome, field: str, kinds: Sequence[str]) -> Counter[Any]:
    """Count the values of a field in the events of some kinds."""
    counts = Counter[Any]()
    for event in outcome.events:
        if event.event in kinds:
            counts[event.fields[field]] += 1
    return counts


def _has_event(outcome: Outcome, kind: str) -> bool:
    return any(event.event == kind for event in outcome.events)


def check_metrics(prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    """Yield differences of two metrics, accuracy and faults, from the events, and impossible metrics and times."""
    metrics_spec = find_method(prepared.scenario).declared
    computed = metrics(outcome, prepared.experiment, prepared.plan, metrics_spec)
    lines = [json.loads(event.to_json()) for event in outcome.events]
    evaluations = [line for line in lines if line["event"] == "evaluate"]
    if evaluations:
        accuracy = computed.get("accuracy")
        expected = evaluations[-1].get("accuracy")
        if accuracy != expected:
            yield f"metrics: accuracy {accuracy}, in the last evaluation {expected}"
    injected = _count_strikes(line for line in lines if line["event"] == "fault")
    listed = _count_strikes(computed["fault_list"])
    if injected != listed:
        yield f"metrics: {listed} faults, but {injected} were injected"
    for name, value in computed.items():
        # In general, a loss has no lower bound, and training may reduce the accuracy.
        may_be_negative = name in ("loss", "accuracy_gain")
        if isinstance(value, float) and value < 0 and not may_be_negative:
            yield f"metrics: {name} is {value}"
    if not _is_ordered(lines):
        yield "metrics: events of one device are not in the order of time"


def _count_strikes(faults: Iterable[dict[str, Any]]) -> int:
    """Count the injections among events or among the entries of ``fault_list``.

    The end of a temporary fault is an event with the phase "undo". The list has only injections, without a phase.
    """
    return sum(fault.get("phase", "strike") == "strike" for fault in faults)


def _is_ordered(lines: Sequence[dict[str, Any]]) -> bool:
    """Return whether the events of each device are in the order of time."""
    previous_times: dict[str, float] = {}
    for line in lines:
        device = line["device"]
        previous_time = previous_times.get(device, -math.inf)
        # Lines resolve nanoseconds, so a difference of one nanosecond has no meaning.
        if line["time"] < previous_time - 1e-9:
            return False
        previous_times[device] = line["time"]
    return True


def check_repetition(first: Outcome, second: Outcome) -> Iterator[str]:
    """Yield differences between two runs of one scenario: of events, only the first one."""
    if (first.status, first.error) != (second.status, second.error):
        yield f"repetition: {first.status} ({first.error}), then {second.status} ({second.error})"
    pairs = zip(first.events, second.events, strict=False)
    for number, (first_event, second_event) in enumerate(pairs):
        first_line = first_event.to_json()
        second_line = second_event.to_json()
        if first_line != second_line:
            yield f"repetition: event {number} differs: {first_line[:150]} / {second_line[:150]}"
            return
    if len(first.events) != len(second.events):
        yield f"repetition: {len(first.events)} events, then {len(second.events)}"
    if first.weights_file != second.weights_file:
        yield "repetition: the weights differ"


def compare_with_undivided(tree: Tree, outcome: Outcome) -> Iterator[str]:
    """Train the undivided model, and yield differences from the weights of a synchronous method."""
    work = tree["workload"]
    if work["method"]["name"] not in SYNCHRONOUS or outcome.status != "finished":
        return
    single_work = {**work, "method": {"name": "single"}}
    single_tree = {**tree, "faults": [], "workload": single_work}
    undivided = simulate_trial(prepare(_make_trial(single_tree)))
    yield from compare_weights(undivided, outcome, "the weights of the undivided model")


def compare_weights(
    expected: Outcome, actual: Outcome, expected_name: str
) -> Iterator[str]:
    """Yield the first tensor whose final values differ between two runs by more than rounding.

    ``expected_name`` names the expected weights in the violation.
    """
    actual_weights = final_weights(actual)
    for name, tensor in final_weights(expected).items():
        other = actual_weights[name]
        # Devices sum gradients in another order than the undivided model.
        if not torch.allclose(other, tensor, rtol=1e-4, atol=1e-5):
            distance = float((other - tensor).abs().max())
            yield f"weights: {name} is {distance:.3g} from {expected_name}"
            return


def final_weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run by name; raises `TensorError` if the run has none."""
    # Bytes in the format of safetensors, not a path.
    return arrays.unpack(outcome.weights_file or b"")

"""Preparation of a trial for a runtime: its method, problem and plan, after all checks.

Everything specific to a kind of work is done by its `testbed.workload.Workload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed import validation
from testbed.common import formats, usercode
from testbed.common.errors import Diagnostic, InputError, Key, TestbedError
from testbed.faults import parts as fault_parts
from testbed.faults.conditions import FaultContext
from testbed.faults.device_actions import Retire
from testbed.faults.script import traced_links
from testbed.hardware import check_message
from testbed.method import Method, PlanningProblem
from testbed.plan import Plan
from testbed.scenario.devices import device_names
from testbed.scenario.points import point_parts
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.metrics_spec import events_of
from testbed.validation import find_method, metrics_spec_of
from testbed.wire.message import ENVELOPE
from testbed.workload import Prepared, workload_of

__all__ = [
    "Prepared",
    "build_problem",
    "count_batches",
    "prepare",
    "prepare_all",
    "raise_refused",
]


def prepare(trial: Trial) -> Prepared:
    """Check and plan a trial. Raises `InputError`, one line for each problem, naming file and line."""
    scenario = trial.scenario
    problems = list(validation.problems(trial))
    # All further checks need a plan, which needs a valid method and problem.
    if problems:
        raise scenario.source.error(problems)
    method, problem = build_problem(trial)
    work = workload_of(scenario.workload)
    try:
        problem, division = work.divide(scenario, method, problem)
        plan = _make_plan(method, problem)
        work.check(method, problem, plan)
    except InputError as error:
        located = _locate_error(error, trial)
        hint = work.hint(problem, error)
        if hint:
            located = replace(located, text=f"{located.text}; {hint}")
        raise scenario.source.error([located]) from None
    problems = _memory_problems(trial, plan)
    if not problems:
        # A message too large for a device would only repeat that its part of the plan is too large.
        problems = _message_problems(trial, method, problem, plan)
    problems += _fault_problems(trial, method, plan)
    if problems:
        raise scenario.source.error(problems)
    return Prepared(trial, method, problem, plan, division)


def prepare_all(runs: Sequence[Trial]) -> tuple[dict[int, Prepared], list[str]]:
    """Prepare the runs of a sweep; return the valid runs by number, and the error texts of the rejected runs.

    A text names the point and the seed. Raises `InputError` if all runs are rejected.
    """
    prepared: dict[int, Prepared] = {}
    refused: list[str] = []
    reasons: list[InputError] = []
    for number, trial in enumerate(runs):
        try:
            prepared[number] = prepare(trial)
        except InputError as error:
            names = point_parts(trial.point)
            if trial.repetition:
                names.append(f"repetition={trial.repetition + 1}")
            names.append(f"seed {trial.scenario.seed}")
            reasons.append(error)
            refused.append(f"{', '.join(names)}: {error}")
    if not prepared:
        # If all points have the same error, the scenario is wrong and not its sweep.
        if len({str(error) for error in reasons}) == 1:
            raise reasons[0]
        raise InputError("\n".join(refused))
    return prepared, refused


def raise_refused(refused: Sequence[str]) -> None:
    """Raise `InputError` with all error texts of `prepare_all`, if any."""
    if refused:
        raise InputError("\n".join(refused))


def _make_plan(method: Method, problem: PlanningProblem) -> Plan:
    """Return the plan of a method; raises `InputError`, also for any other error in a planner of the user."""
    try:
        return method.plan(problem)
    except TestbedError:
        raise
    except Exception as error:
        text = usercode.describe_error(error)
        # An error outside the user's files is a fault of the testbed, and keeps its traceback.
        if text is None:
            raise
        raise InputError(text, ("method", "file")) from error


def build_problem(trial: Trial) -> tuple[Method, PlanningProblem]:
    """Return the method of a trial and the problem for the method's planner.

    Raises `InputError` if the workload names unknown or incompatible items. Reads no data files.
    """
    scenario, experiment = trial.scenario, trial.experiment
    workload = scenario.workload
    try:
        method = find_method(scenario)
        options = method.Options.model_validate(workload.method.options())
        links, devices = experiment.bounded_links(), experiment.sharing_devices()
        base_problem: PlanningProblem = PlanningProblem(
            devices, links, workload, options, scenario.seed
        )
        return method, workload_of(workload).extend_problem(
            base_problem, scenario, method
        )
    except InputError as error:
        raise scenario.source.error([_locate_error(error, trial)]) from None


def count_batches(scenario: Scenario, plan: Plan) -> int | None:
    """Return the number of batches of a run; None if the number depends on data files or on the division of
    the data."""
    bounds = (workload_of(scenario.workload).total(scenario), plan.steps)
    return min((bound for bound in bounds if bound is not None), default=None)


def _memory_problems(trial: Trial, plan: Plan) -> list[Diagnostic]:
    problems = []
    devices = {device.name: device for device in trial.experiment.devices}
    for name in plan.devices:
        device = devices[name]
        if plan.memory(name) > device.memory:
            text = (
                f"'{name}' has {formats.size(device.memory)} of memory, its part of the plan needs "
                f"{formats.size(plan.memory(name))}: use more or larger devices, a smaller model or batch_size"
            )
            problems.append(Diagnostic(_device_key(name, trial.scenario), text))
    return problems


def _message_problems(
    trial: Trial, method: Method, problem: PlanningProblem, plan: Plan
) -> list[Diagnostic]:
    """Report the first planned message too large for a device, with the text of the error during a run."""
    devices = {device.name: device for device in problem.devices}
    for sender, receiver, size in method.largest_messages(problem, plan):
        # A message to oneself is handed over without being encoded.
        if sender == receiver:
            continue
        sender_and_receiver = devices[sender], devices[receiver]
        try:
            check_message(int(size + ENVELOPE), *sender_and_receiver)
        except TestbedError as error:
            smaller = min(sender_and_receiver, key=lambda device: device.memory)
            # One error is enough: the other messages usually have the same size.
            return [Diagnostic(_device_key(smaller.name, trial.scenario), str(error))]
    return []


def _fault_problems(trial: Trial, method: Method, plan: Plan) -> list[Diagnostic]:
    experiment = trial.experiment
    links = experiment.links
    first = experiment.devices[0].name
    changes = traced_links(links, experiment.changes, first)
    context = FaultContext(
        experiment.devices,
        links,
        [(pair, link) for _, pair, link in changes],
        experiment.time_limit,
        experiment.radio,
    )
    problems = fault_parts.problems(
        experiment.faults,
        context,
        lambda device: method.spans(plan, device),
        events_of(metrics_spec_of(method, trial.scenario.workload)),
        count_batches(trial.scenario, plan),
    )
    for index, fault in enumerate(experiment.faults):
        action = fault.action
        if not isinstance(action, Retire):
            continue
        # Without support, the device would stay until the run ends, as if the fault had never struck.
        if "retirement" not in method.supports:
            text = (
                f"method '{method.name}' does not support graceful shutdown: use kill"
            )
        elif action.target == plan.coordinator:
            text = f"'{plan.coordinator}' is the coordinator of the run, which would then end: use another device"
        else:
            continue
        problems.append(Diagnostic(("faults", index, "retire"), text))
    return problems


def _device_key(name: str, scenario: Scenario, field: str = "memory") -> Key:
    """Return the scenario key of a device's property; the key of the device if the profile sets the property."""
    for part_name, part in scenario.devices.items():
        if name in device_names(part_name, part):
            field_key = (field,) if field in part.model_fields_set else ()
            return ("devices", part_name, *field_key)
    return ("devices",)


def _locate_error(error: InputError, trial: Trial) -> Diagnostic:
    """Prefix an error with the scenario key of the affected workload field or device."""
    # Most planners raise errors without a key: an option of the method is the likely cause.
    key = error.key or ("method",)
    if key[0] in type(trial.scenario.workload).model_fields:
        return Diagnostic(("workload", *key), error.text)
    if key[0] == "devices" and len(key) > 2:
        name, field = str(key[1]), str(key[2])
        return Diagnostic(_device_key(name, trial.scenario, field), error.text)
    return Diagnostic(key, error.text)

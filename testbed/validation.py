"""Validation of a scenario across its keys, before a problem or plan exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network

from pydantic import ValidationError

from testbed import methods
from testbed.common.conditions import parse_condition
from testbed.common.errors import Diagnostic, InputError, Key, nearest
from testbed.faults.parts import devices_named
from testbed.method import Method
from testbed.network.checks import RESERVED_NAMES, has_room, no_room_text
from testbed.scenario.expand import unknown_device_text
from testbed.scenario.explaining import explain
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed.trace.registry import (
    OF_DEVICES,
    metric_kind,
    metrics_of,
)
from testbed.work import WorkloadPart
from testbed.workload import workload_of


def problems(trial: Trial) -> Iterator[Diagnostic]:
    """Yield all problems of a trial's method, model, data, names and expectations."""
    yield from _workload_problems(trial.scenario)
    yield from _name_problems(trial)
    yield from _expect_problems(trial, _metrics_specs(trial.scenario))


def find_method(scenario: Scenario) -> Method:
    """Return the method named by a scenario. Raises `InputError` for an unknown one."""
    return methods.find(scenario.workload, scenario.source.folder)


def _workload_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    workload = scenario.workload
    method = _method_or_problem(scenario)
    if isinstance(method, Diagnostic):
        yield method
        yield from workload_of(workload).problems(scenario, None)
        return
    if workload.task not in method.tasks:
        supported = ", ".join(method.tasks)
        yield Diagnostic(
            ("workload", "task"),
            f"the method '{method.name}' does not support the task '{workload.task}'; supported: {supported}",
        )
    try:
        method.Options.model_validate(workload.method.options())
    except ValidationError as error:
        yield from explain(error, method.Options, ("workload", "method"))
        name_key: Key = ("workload", "method", "name")
        # --set of the name alone leaves the options of another method, which this method refuses.
        if scenario.source.where(name_key).startswith("--set"):
            yield Diagnostic(
                name_key,
                "leaves the options of the former method in place; to remove them, write "
                f"--set 'workload.method={{name: {method.name}}}'",
            )
    yield from workload_of(workload).problems(scenario, method)


def _method_or_problem(scenario: Scenario) -> Method | Diagnostic:
    try:
        return find_method(scenario)
    except InputError as error:
        return Diagnostic(("workload", *error.key), error.text)


def metrics_spec_of(method: Method, workload: WorkloadPart) -> MetricsSpec:
    """Return the metrics, events and report sections defined by a method and a workload."""
    return workload_of(workload).declared.joined(method.declared)


def _metrics_specs(scenario: Scenario) -> list[MetricsSpec]:
    """Return the definitions of a run's metrics; for an unknown method, the definitions of all methods."""
    method = _method_or_problem(scenario)
    # An unknown method has an error already; its metrics must not cause another one.
    candidates = (
        methods.METHODS.values() if isinstance(method, Diagnostic) else [method]
    )
    return [metrics_spec_of(candidate, scenario.workload) for candidate in candidates]


def _name_problems(trial: Trial) -> Iterator[Diagnostic]:
    names = [device.name for device in trial.experiment.devices]
    for name in sorted({*RESERVED_NAMES} & {*names}):
        yield Diagnostic(
            ("devices", name),
            "this name is reserved for the testbed or its containers: use another one",
        )
    if not has_room(IPv4Network(trial.scenario.network.subnet), len(names)):
        yield Diagnostic(
            ("network", "subnet"),
            no_room_text(trial.scenario.network.subnet, len(names)),
        )
    for index, part in enumerate(trial.scenario.faults):
        for key, name in devices_named(part):
            text = unknown_device_text(name, trial.scenario, names)
            if text is not None:
                yield Diagnostic(("faults", index, *key), text)


def _expect_problems(
    trial: Trial, specs: Sequence[MetricsSpec]
) -> Iterator[Diagnostic]:
    metrics: dict[str, Metric] = {}
    former: dict[str, str] = {}
    for spec in specs:
        metrics |= metrics_of(spec)
        former |= spec.former_metrics
    names = [device.name for device in trial.experiment.devices]
    for name, text in trial.scenario.expect.items():
        key: Key = ("expect", name)
        parts = name.split(".")
        # A name such as devices.worker1.bytes_sent.
        is_device_metric = parts[0] == "devices" and len(parts) == 3
        if is_device_metric:
            unknown_device = unknown_device_text(parts[1], trial.scenario, names)
            if unknown_device is not None:
                yield Diagnostic(key, unknown_device)
        try:
            parse_condition(text, metric_kind(name, metrics))
        except KeyError:
            if is_device_metric:
                unknown = f"unknown metric of a device '{parts[-1]}'"
                suggestion = nearest(parts[-1], OF_DEVICES)
            elif name in former:
                unknown = f"'{name}' has been renamed"
                suggestion = f"write '{former[name]}'"
            else:
                unknown = f"unknown metric '{name}'"
                suggestion = nearest(parts[-1], metrics)
            yield Diagnostic(key, f"{unknown}: {suggestion}")
        except ValueError as error:
            yield Diagnostic(key, str(error))

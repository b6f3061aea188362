"""What is wrong with a scenario across its keys, as far as that shows before there is a problem and a plan.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv4Network

from pydantic import ValidationError

from testbed import methods
from testbed.common.conditions import parse_condition
from testbed.common.errors import Diagnostic, InputError, Key, nearest
from testbed.faults.parts import devices_named
from testbed.method import Method
from testbed.ml.data import catalog as data
from testbed.ml.models import catalog as models
from testbed.network.checks import RESERVED_NAMES, has_room, no_room
from testbed.scenario.expand import no_such_devices
from testbed.scenario.explaining import explain
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.figures import Figure
from testbed.trace.registry import OF_DEVICES, figures_of, kind_of
from testbed.workload import ModelPart, WorkloadPart


def problems(trial: Trial) -> Iterator[Diagnostic]:
    """Yield what is wrong with a trial's method, model, data, names and expectations."""
    scenario, figures = trial.scenario, _figures(trial.scenario)
    yield from _workload_problems(scenario)
    yield from _folder_problems(scenario)
    yield from _name_problems(trial)
    yield from _expect_problems(trial, figures)


def find_method(scenario: Scenario) -> Method:
    """Return the method that a scenario names; raises `InputError` where there is none such."""
    return methods.find(scenario.workload.method, scenario.source.folder)


def _workload_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    workload = scenario.workload
    key: Key = ("workload",)
    method = _method_or_problem(scenario)
    if isinstance(method, Diagnostic):
        yield method
    else:
        if workload.task not in method.tasks:
            can = " and ".join(method.tasks)
            yield Diagnostic((*key, "task"), f"the method '{method.name}' cannot {workload.task}: it can {can}")
        if workload.numerics == "none" and "timing_only" not in method.supports:
            can = ", ".join(each.name for each in methods.METHODS.values() if "timing_only" in each.supports)
            text = f"the method '{method.name}' cannot do without numbers: use full, or one of {can}"
            yield Diagnostic((*key, "numerics"), text)
        if workload.numerics == "stacked" and "stacked" not in method.supports:
            can = ", ".join(each.name for each in methods.METHODS.values() if "stacked" in each.supports)
            yield Diagnostic((*key, "numerics"), f"'stacked' is for methods such as {can}: use full")
        try:
            method.Options.model_validate(workload.method.options())
        except ValidationError as error:
            yield from explain(error, method.Options, (*key, "method"))
            named: Key = (*key, "method", "name")
            if scenario.source.where(named).startswith("--set"):
                text = "keeps the other options as they were; to replace them as well, write "
                yield Diagnostic(named, f"{text}--set 'workload.method={{name: {method.name}}}'")
    if workload.task != "program":
        yield from _model_problems(workload.model)
        yield from _data_problems(scenario)


def _model_problems(part: ModelPart) -> Iterator[Diagnostic]:
    key: Key = ("workload", "model")
    try:
        if part.file is not None or models.code_of(part.name) is not None:
            return  # it is made, or refused, with the problem
    except InputError as error:
        yield _located(error)
        return
    if part.units is not None:
        yield Diagnostic((*key, "units"), "cuts a model of your own, by `file`; those of the list have their units")
    try:
        options = models.find(part.name).Options
        options.model_validate(part.options())
    except InputError as error:
        yield _located(error)
    except ValidationError as error:
        yield from explain(error, options, key)


def _method_or_problem(scenario: Scenario) -> Method | Diagnostic:
    try:
        return find_method(scenario)
    except InputError as error:
        return _located(error)


def _located(error: InputError) -> Diagnostic:
    """Return what is wrong with a workload, whose keys an error names."""
    return Diagnostic(("workload", *error.key), error.text)


def _data_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    name = scenario.workload.data.name
    key: Key = ("workload", "data")
    try:
        kind = data.describe_part(scenario.workload.data, scenario.data_folder)
    except InputError as error:
        yield _located(error)
        return
    if not kind.classes and scenario.workload.task == "train":
        yield Diagnostic(
            (*key, "name"), f"{name} has no labels to learn from: use the task infer, or data such as digits"
        )
    path = scenario.workload.data.path
    if data.is_own(scenario.workload.data):
        try:
            labels = data.train_labels(scenario.workload.data, scenario.data_folder)
            yield from batch_problems(scenario.workload, len(labels))
            if labels.ndim == 1 and labels.dtype.kind == "f" and scenario.workload.training.loss.plain:
                text = "the labels are numbers, and cross-entropy is of classes: name a loss such as mse"
                yield Diagnostic(("workload", "training", "loss"), text)
        except InputError as error:
            yield _located(error)
        return
    there = data.known_samples(scenario.workload.data)
    if there is not None:
        yield from batch_problems(scenario.workload, there)
    if kind.from_path and path is None:
        yield Diagnostic(key, f"{name} is a picture of your own: name its file with `path`, or use photos")
    elif not kind.from_path and (path is not None or scenario.workload.data.file is not None):
        yield Diagnostic((*key, "path"), f"{name} is not read from one file: use the data image, or leave `path` out")


def batch_problems(workload: WorkloadPart, there: int) -> Iterator[Diagnostic]:
    """Yield what is wrong with a batch larger than all training samples, where the lead has them."""
    size = workload.batch_size
    if workload.task == "train" and workload.data.split == "lead" and size > there:
        text = f"a batch of {size} is more than the {there} training samples: use at most {there}"
        yield Diagnostic(("workload", "batch_size"), text)


def _folder_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    """Look for the data's files. Not a part of `build_problem`: devices are sent their data and have no such folder."""
    part = scenario.workload.data
    with suppress(InputError):  # `_data_problems` reports unknown names and broken packages
        if data.is_own(part):
            return
        for key, text in data.problems(part, scenario.data_folder):
            yield Diagnostic(("workload", "data", *key), text)


def _figures(scenario: Scenario) -> dict[str, Figure]:
    """Return the figures that a run of the scenario may have; with a method that there is not, those of all methods."""
    method = _method_or_problem(scenario)
    known = methods.METHODS.values() if isinstance(method, Diagnostic) else [method]
    return {each: figure for method in known for each, figure in figures_of(method.declared).items()}


def _name_problems(trial: Trial) -> Iterator[Diagnostic]:
    names = [device.name for device in trial.experiment.devices]
    for name in sorted({*RESERVED_NAMES} & {*names}):
        yield Diagnostic(("devices", name), "this name is reserved for the testbed or its containers: use another one")
    if not has_room(IPv4Network(trial.scenario.network.subnet), len(names)):
        yield Diagnostic(("network", "subnet"), no_room(trial.scenario.network.subnet, len(names)))
    for index, part in enumerate(trial.scenario.faults):
        for key, text in no_such_devices(devices_named(part), trial.scenario, names):
            yield Diagnostic(("faults", index, *key), text)


def _expect_problems(trial: Trial, figures: Mapping[str, Figure]) -> Iterator[Diagnostic]:
    names = [device.name for device in trial.experiment.devices]
    for figure, text in trial.scenario.expect.items():
        key: Key = ("expect", figure)
        parts = figure.split(".")
        of_device = parts[0] == "devices" and len(parts) == 3
        if of_device:
            for _, wrong in no_such_devices([(key, parts[1])], trial.scenario, names):
                yield Diagnostic(key, wrong)
        try:
            parse_condition(text, kind_of(figure, figures))
        except KeyError:
            what, known = ("figure of a device", [*OF_DEVICES]) if of_device else ("figure", [*figures])
            yield Diagnostic(
                key, f"there is no {what} '{parts[-1] if of_device else figure}': {nearest(parts[-1], known)}"
            )
        except ValueError as error:
            yield Diagnostic(key, str(error))

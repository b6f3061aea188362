"""From an experiment to something a runtime can start: method, problem and plan, once every check has passed.

Imports no torch and reads no data, so that `testbed validate` and `plan` answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from testbed import validation
from testbed.common import formats, usercode
from testbed.common.errors import Diagnostic, InputError, Key, TestbedError
from testbed.common.lazy import np
from testbed.common.seeds import derive
from testbed.common.usercode import Code
from testbed.deployment import Deployments, model_of
from testbed.experiment import Experiment
from testbed.faults import parts as fault_parts
from testbed.faults.conditions import FaultSetting
from testbed.faults.device_actions import Retire
from testbed.faults.script import traced_links
from testbed.hardware import check_message
from testbed.method import Method, Problem
from testbed.methods.external import code_of
from testbed.ml.data import catalog as data
from testbed.ml.data.batches import Indices, steps_per_epoch
from testbed.ml.data.dataset import Dataset
from testbed.ml.data.split import class_counts, is_class
from testbed.ml.data.split import split as shared
from testbed.ml.models import catalog as models
from testbed.ml.models import weights
from testbed.ml.models.chain import Model
from testbed.ml.models.making import KEY as MODEL_FILE
from testbed.ml.training.schema import NamedPart, named_in
from testbed.plan import Plan
from testbed.scenario.devices import device_names
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.points import point_parts
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.figures import events_of
from testbed.validation import find_method
from testbed.wire.message import ENVELOPE
from testbed.workload import SplitPart, WorkloadPart

MOST_BYTES = 20_000_000
"""Bytes of the files of all programs together: they travel with the deployment, and lie in the device's memory."""


@dataclass(frozen=True)
class Prepared:
    """A trial that a runtime can start."""

    trial: Trial
    method: Method
    problem: Problem
    plan: Plan
    pretraining: Prepared | None = None
    """What leaves the weights to begin with, where they come from a scenario."""
    shares: Mapping[str, Indices] = field(default_factory=dict)
    """Indices of the training samples of each device that owns data, (samples,); empty where all are the lead's."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of this trial alone."""
        return self.trial.scenario

    @property
    def experiment(self) -> Experiment:
        """The same as a runtime needs it."""
        return self.trial.experiment

    def deployments(self, run: str, token: str, addresses: Mapping[str, str], broadcast: str | None) -> Deployments:
        """Return what each device is given to know; raises `InputError` where a file of the user's is no text.

        ``addresses`` are the devices' on the data network.
        """
        codes = code_of(self.method), model_code(self.scenario)
        return Deployments(self.method, self.problem, self.plan, run, token, addresses, broadcast, *codes)

    def share(self, dataset: Dataset, device: str) -> Dataset | None:
        """Return what a device is given: the training samples that it owns, and the test samples if it is the lead.

        All samples where the method has them everywhere. None where that is nothing.
        """
        if self.scenario.workload.task == "program":
            return None
        lead = device == self.plan.lead
        if "all_samples" in self.method.supports and device in self.plan.devices:
            return dataset
        if not self.shares:
            return dataset if lead else None
        own = self.shares.get(device)
        if own is None and not lead:
            return None
        part = dataset.part(np.empty(0, np.int64) if own is None else own, lead)
        split = self.problem.workload.data.split
        if own is None or not isinstance(split, SplitPart) or split.noise is None:
            return part
        place = 1 + list(self.shares).index(device)
        seed = derive(self.problem.seed, "noise", device)
        return part.noisy((split.noise * place / len(self.shares)) ** 0.5, seed)

    def owned(self) -> dict[str, dict[int, int]]:
        """Return how many training samples of which classes each device owns; empty where all are the lead's.

        Labels that are no classes count as class 0. Raises `InputError` where the data cannot be read any more.
        """
        if not self.shares:
            return {}
        labels = data.train_labels(self.problem.workload.data, self.scenario.data_folder)
        return class_counts(labels if is_class(labels) else np.zeros(len(labels), np.int64), self.shares)


def prepare(trial: Trial) -> Prepared:
    """Check and plan a trial. Raises `InputError`, one line for each problem, naming file and line."""
    scenario = trial.scenario
    if problems := list(validation.problems(trial)):
        # What is left to check follows from a plan, and there is none without a method, a model and its data.
        raise scenario.source.error(problems)
    method, problem = build_problem(trial)
    try:
        _check_training(method, problem)
        _check_precision(method, problem)
        shares = _shares(scenario, method, problem)
        problem = replace(problem, samples={name: len(share) for name, share in shares.items()})
        _check_last_batch(method, problem)
        _check_normalisation(method, problem)
        plan = _planned(method, problem)
        _check_tied(method, problem, plan)
    except InputError as error:
        found = _locate(error, trial)
        if error.key[-1:] == ("stages",) and problem.model.held:
            found = replace(found, text=f"{found.text}; {problem.model.held[0]}")
        raise scenario.source.error([found]) from None
    try:
        pretraining = _pretraining(scenario, problem.model)
    except InputError as error:
        raise scenario.source.error([Diagnostic(("workload", "model", "weights"), error.text)]) from None
    problems = [
        *(_memory_problems(trial, plan) or _message_problems(trial, method, problem, plan)),
        *_fault_problems(trial, method, plan),
    ]
    if problems:
        raise scenario.source.error(problems)
    return Prepared(trial, method, problem, plan, pretraining, shares)


def prepare_all(runs: Sequence[Trial]) -> tuple[dict[int, Prepared], list[str]]:
    """Prepare the runs of a sweep; return those that can be run, by their numbers, and a text for each refused one.

    A text names the point and the seed. Raises `InputError` where all are refused.
    """
    prepared: dict[int, Prepared] = {}
    refused: list[str] = []
    reasons: list[InputError] = []
    for number, trial in enumerate(runs):
        try:
            prepared[number] = prepare(trial)
        except InputError as error:
            again = [f"repetition={trial.repetition + 1}"] if trial.repetition else []
            named = ", ".join([*point_parts(trial.point), *again, f"seed {trial.scenario.seed}"])
            reasons.append(error)
            refused.append(f"{named}: {error}")
    if not prepared:
        same = len({str(error) for error in reasons}) == 1
        raise reasons[0] if same else InputError("\n".join(refused))
    return prepared, refused


def raise_refused(refused: Sequence[str]) -> None:
    """Raise `InputError` with the texts of `prepare_all`, if there are any."""
    if refused:
        raise InputError("\n".join(refused))


def _check_training(method: Method, problem: Problem) -> None:
    if problem.workload.model.weights is not None and "initial_weights" not in method.supports:
        text = f"'{method.name}' begins with weights drawn from the seed, and reads none: leave this out"
        raise InputError(text, ("model", "weights"))
    if problem.workload.task != "train":
        return
    problem.training.check()
    part = problem.workload.training
    if part.judged and "early_stopping" not in method.supports:
        text = f"'{method.name}' trains to its last step: leave 'until', 'patience' and 'best' out"
        raise InputError(text, ("training",))
    if part.judged and getattr(problem.options, "evaluate_every", None) is None:
        text = "'until', 'patience' and 'best' look at evaluations: write how often there is one, evaluate_every"
        raise InputError(text, ("method",))
    if part.judged and isinstance(getattr(problem.options, "evaluate_every", None), float):
        text = "'until', 'patience' and 'best' look at evaluations after so many steps or rounds: give a number of them"
        raise InputError(text, ("method", "evaluate_every"))
    given = part.given()
    for key, reason in method.refuses.items():
        if key in given:
            text = f"'{method.name}' does not do this ({reason}): leave it out, or take another method"
            raise InputError(text, ("training", *key.split(".")))


def _check_tied(method: Method, problem: Problem, plan: Plan) -> None:
    """Refuse a plan that divides units which share a trained weight, unless the method trains its copies as one."""
    if problem.workload.task != "train" or "tied_weights" in method.supports:
        return
    for tied in problem.model.tied:
        for piece in plan.pieces:
            held = sum(piece.first <= unit < piece.last for unit in tied.units)
            if held and (held < len(tied.units) or piece.part is not None):
                raise InputError(
                    f"the network uses one weight as {tied.title}, and '{method.name}' gives {piece.device} a part of "
                    "that: take pipeline, gpipe or model-parallelism, which add up its gradients, or untie it",
                    ("model",),
                )


def _check_precision(method: Method, problem: Problem) -> None:
    for device in problem.devices:
        if device.precision == "f32":
            continue
        if "precisions" not in method.supports:
            text = f"'{method.name}' computes in float32: leave this out of {device.name}"
            raise InputError(text, ("devices", device.name, "precision"))
        if device.precision == "int8" and problem.workload.task == "train":
            text = f"int8 is of weights that are not trained: take f16 or bf16 for {device.name}"
            raise InputError(text, ("devices", device.name, "precision"))


def _check_normalisation(method: Method, problem: Problem) -> None:
    samples = min([method.samples_at_once(problem), *problem.samples.values()])
    for unit in problem.model.units:
        if problem.workload.task == "train" and samples < unit.least_samples:
            raise InputError(
                f"{unit.name} normalises over samples alone, and {samples} at once has no variance: "
                "use larger batches, or fewer micro-batches of each",
                ("batch_size",),
            )


def _check_last_batch(method: Method, problem: Problem) -> None:
    """Raise `InputError` where a method has batches of one size, or the last one is too small for the model."""
    workload, key = problem.workload, ("drop_last",)
    if workload.drop_last or workload.task != "train":
        return
    if "smaller_batches" not in method.supports:
        raise InputError(f"'{method.name}' takes batches of one size: leave this out", key)
    known = data.known_samples(workload.data)
    counts = [*problem.samples.values()] or ([known] if known else [])
    parts = workload.batch_size // method.samples_at_once(problem)
    needed = max(unit.least_samples for unit in problem.model.units)
    for count in counts:
        last = count % workload.batch_size
        if last and last // min(parts, last) < needed:
            text = f"the last batch of {count} samples has {last}, too few to normalise: use another batch_size"
            raise InputError(text, key)


def _planned(method: Method, problem: Problem) -> Plan:
    """Return the plan of a method; raises `InputError`, also where a user's own planner raises something else."""
    try:
        return method.plan(problem)
    except Exception as error:
        text = None if isinstance(error, TestbedError) else usercode.located(error)
        if text is None:
            raise
        raise InputError(text, ("method", "file")) from error


def model_code(scenario: Scenario) -> Code | None:
    """Return the text of the model's file or package; None for a model of the catalogue. Raises `InputError`."""
    part = scenario.workload.model
    if part.file is None:
        return models.code_of(part.name)
    return usercode.read(scenario.source.folder / part.file, part.name, MODEL_FILE)


def training_codes(scenario: Scenario) -> dict[str, Code]:
    """Return the text of the files that the training names, by what each is called. Raises `InputError`."""
    named = [(("training", key, "file"), part) for key, part in scenario.workload.training.parts()]
    return {part.title: _code(scenario, part, key) for key, part in named if part.file is not None}


def _option_codes(scenario: Scenario, options: BaseModel) -> dict[str, Code]:
    """Return the same of what the method's options name. Raises `InputError`, also for a file without such a name."""
    found = {}
    for key, part in named_in(options, ("method",)):
        if part.file is not None:
            found[part.title] = _code(scenario, part, key)
            usercode.function(found[part.title], key)
    return found


def _code(scenario: Scenario, part: NamedPart, key: Key) -> Code:
    return usercode.read(scenario.source.folder / str(part.file), part.name, key)


def _files(scenario: Scenario) -> dict[str, bytes]:
    """Return what the workload's programs find in their folders, by name. Raises `InputError`."""
    found: dict[str, bytes] = {}
    for device, part in scenario.workload.programs.items():
        for name in part.files:
            file = scenario.source.folder / name
            try:
                found[name] = file.read_bytes()
            except OSError as error:
                text = f"{file} cannot be read ({error.strerror}): name a file, relative to the scenario"
                raise InputError(text, ("programs", device, "files")) from None
    if sum(map(len, found.values())) > MOST_BYTES:
        raise InputError(f"the files of all programs are more than {formats.size(MOST_BYTES)}", ("programs",))
    return found


def build_problem(trial: Trial) -> tuple[Method, Problem]:
    """Return the method and the problem that a trial poses it: what a planner looks at.

    Raises `InputError` where the workload names what does not exist or what does not fit. Needs no data files.
    """
    scenario, experiment = trial.scenario, trial.experiment
    workload = scenario.workload
    try:
        method, files = find_method(scenario), _files(scenario)
        options = method.Options.model_validate(workload.method.options())
        codes = training_codes(scenario) | _option_codes(scenario, options)
        kind = data.describe_part(workload.data, scenario.data_folder)
        model = model_of(workload, model_code(scenario), kind.classes, kind.entering)
    except InputError as error:
        raise scenario.source.error([_locate(error, trial)]) from None
    return method, Problem(
        model,
        experiment.sharing_devices(),
        experiment.bounded_links(),
        workload,
        options,
        scenario.seed,
        files=files,
        codes=codes,
        frozen_placed="fixed_units" in method.supports,
    )


def batches(scenario: Scenario, plan: Plan) -> int | None:
    """Return how many batches a run has; None where only the data's files can tell, or who owns how many."""
    known = [count for count in (_workload_batches(scenario), plan.steps) if count is not None]
    return min(known, default=None)


def _workload_batches(scenario: Scenario) -> int | None:
    workload = scenario.workload
    if workload.task != "train":
        return workload.requests
    if workload.steps is not None:
        return workload.steps
    if workload.data.split != "lead":
        return None
    samples = data.known_samples(workload.data)
    if samples is None or workload.epochs is None:
        return None
    return workload.epochs * steps_per_epoch(samples, workload.batch_size, workload.drop_last)


def _shares(scenario: Scenario, method: Method, problem: Problem) -> dict[str, Indices]:
    """Return who owns which training samples; empty where all are the lead's. Raises `InputError`.

    Reads the labels, of data that are split alone. Not a part of `build_problem`: devices are sent their samples.
    """
    part, key = problem.workload.data, ("data", "split")
    owners = method.data_owners(problem)
    if part.split == "lead":
        if owners:
            text = f"the devices of '{method.name}' learn from their own samples: write iid, or keys such as dirichlet"
            raise InputError(text, key)
        return {}
    if not owners or problem.workload.task == "infer":
        reason = "an inference learns from none" if owners else f"'{method.name}' keeps all of them on its lead"
        raise InputError(f"shares training samples among devices, but {reason}: leave it out", key)
    labels = data.train_labels(part, scenario.data_folder)
    groups = data.train_groups(part, scenario.data_folder)
    return shared(labels, problem.model.classes, owners, part.split, problem.seed, groups)


def _pretraining(scenario: Scenario, model: Model) -> Prepared | None:
    """Check the file of the weights, and return what it takes to train them where it is a scenario.

    Not a part of `build_problem`: devices are sent their weights and have no such file. Raises `InputError`.
    """
    file = scenario.weights_file
    if file is None:
        return None
    if not weights.is_scenario(file):
        weights.check(file, model)
        return None
    runs = trials(load(str(file), []))
    first = runs[0].scenario
    if len(runs) > 1:
        raise InputError(f"{file}: has {len(runs)} runs: name a scenario of one, without sweep and repetitions")
    if first.workload.task != "train":
        raise InputError(f"{file}: trains nothing: name a scenario whose task is train")
    if first.workload.model.weights is not None and weights.is_scenario(Path(first.workload.model.weights)):
        raise InputError(f"{file}: begins with the weights of a scenario itself: name one that does not")
    found = prepare(runs[0])
    if found.problem.model != model:
        raise InputError(
            f"{file}: trains another {model.name}: give both scenarios the same model, with the same options, and "
            "samples of the same shape"
            if found.problem.model.name == model.name
            else f"{file}: trains {found.problem.model.name}, not {model.name}: name a scenario with the same model"
        )
    return found


def _memory_problems(trial: Trial, plan: Plan) -> list[Diagnostic]:
    found = []
    devices = {device.name: device for device in trial.experiment.devices}
    for name in plan.devices:
        device = devices[name]
        if plan.memory(name) > device.memory:
            text = (
                f"'{name}' has {formats.size(device.memory)} of memory, its part of the plan needs "
                f"{formats.size(plan.memory(name))}: use more or larger devices, a smaller model or batch_size"
            )
            found.append(Diagnostic(_device_key(name, trial.scenario), text))
    return found


def _message_problems(trial: Trial, method: Method, problem: Problem, plan: Plan) -> list[Diagnostic]:
    """Return the first message that would be refused while the run goes on, in the same words."""
    devices = {device.name: device for device in problem.devices}
    for sender, receiver, size in method.largest_messages(problem, plan):
        ends = devices[sender], devices[receiver]
        if sender == receiver:
            continue
        try:
            check_message(int(size + ENVELOPE), *ends)
        except TestbedError as error:
            smaller = min(ends, key=lambda device: device.memory)
            return [Diagnostic(_device_key(smaller.name, trial.scenario), str(error))]
    return []


def _fault_problems(trial: Trial, method: Method, plan: Plan) -> list[Diagnostic]:
    experiment = trial.experiment
    links = experiment.links
    traced = [(pair, link) for _, pair, link in traced_links(links, experiment.changes, experiment.devices[0].name)]
    found = fault_parts.problems(
        experiment.faults,
        FaultSetting(experiment.devices, links, traced, experiment.time_limit, experiment.radio),
        lambda device: method.spans(plan, device),
        events_of(method.declared),
        batches(trial.scenario, plan),
    )
    for index, fault in enumerate(experiment.faults):
        action = fault.action
        if not isinstance(action, Retire):
            continue
        if "retirement" not in method.supports:
            text = f"no device of '{method.name}' hands over what it holds: use kill"
            found.append(Diagnostic(("faults", index, "retire"), text))
        elif action.target == plan.lead:
            found.append(Diagnostic(("faults", index, "retire"), f"'{plan.lead}' leads the run, which would end"))
    return found


def _device_key(name: str, scenario: Scenario) -> Key:
    """Return the key of the part of the scenario that makes a device."""
    for part_name, part in scenario.devices.items():
        if name in device_names(part_name, part):
            part_key: Key = ("devices", part_name)
            return (*part_key, "memory") if part.memory is not None else part_key
    return ("devices",)


def _locate(error: InputError, trial: Trial) -> Diagnostic:
    """Find the scenario's key for one of the workload, of a device by its name, or of the scenario itself."""
    key = error.key or ("method",)
    if key[0] in WorkloadPart.model_fields:
        return Diagnostic(("workload", *key), error.text)
    if key[0] == "devices" and len(key) > 1:
        return Diagnostic(_device_key(str(key[1]), trial.scenario), error.text)
    return Diagnostic(key, error.text)

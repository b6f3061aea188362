"""Preparation of a run of training or inference: checks, data, the division of samples, initial weights.

Only the controller prepares runs. `testbed.ml.learning` calls these functions in this order:

1. `find_problems` checks a scenario as far as possible without a planning problem,
2. `model_code`, `read_codes` and `describe_data` supply the parts of the planning problem,
3. `divide` checks the problem and decides which device owns which training samples,
4. `check_tied_weights` checks the plan,
5. `load_data` and `samples_of` supply the samples of the devices,
6. `export_weights` gives the weights of a finished run the names of the user's network.

A share is the training samples that one device owns by `workload.data.split`. Without a split all samples are at the
coordinator.

Keys of the `InputError`s raised here are relative to the key ``workload``; keys of `Diagnostic`s begin with
``workload``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from testbed import method as core
from testbed import methods
from testbed.common import usercode
from testbed.common.errors import Diagnostic, InputError, Key
from testbed.common.lazy import np
from testbed.common.seeds import derive
from testbed.common.usercode import Code
from testbed.ml.data import catalog as data
from testbed.ml.data.batches import Indices, steps_per_epoch
from testbed.ml.data.dataset import Dataset
from testbed.ml.data.split import class_counts, is_class, split_samples
from testbed.ml.method import Method, PlanningProblem
from testbed.ml.models import catalog as models
from testbed.ml.models import weights
from testbed.ml.models.chain import Model
from testbed.ml.models.maker import MODEL_FILE_KEY
from testbed.ml.training.schema import NamedPart, named_in
from testbed.ml.workload import DataPart, LearningPart, ModelPart, SplitPart
from testbed.plan import Plan
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.explaining import explain
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from testbed.trace.outcome import Outcome
from testbed.wire import arrays
from testbed.workload import Prepared


@dataclass(frozen=True)
class Division:
    """The decisions before planning: the owners of samples, and a run training the initial weights."""

    shares: Mapping[str, Indices] = field(default_factory=dict)
    """Indices of the training samples of each device with data, (samples,); empty if all are at the coordinator."""
    pretraining: Prepared | None = None
    """The run that trains the initial weights; None unless `model.weights` names a scenario."""


def workload_section(scenario: Scenario) -> LearningPart:
    """Return the workload keys of a scenario for training or inference."""
    assert isinstance(scenario.workload, LearningPart)
    return scenario.workload


def data_folder(scenario: Scenario) -> Path:
    """Return the file or folder of the data: as the scenario names it, or the folder of `testbed setup data`."""
    part = workload_section(scenario).data
    for path in (part.file, part.path, part.folder):
        if path:
            return scenario.source.folder / path
    return data.data_place(part.name)


def weights_file(scenario: Scenario) -> Path | None:
    """Return the file of the model's initial weights; None for weights drawn from the seed."""
    path = workload_section(scenario).model.weights
    return None if path is None else scenario.source.folder / path


def pretraining_of(prepared: Prepared) -> Prepared | None:
    """Return the run training the initial weights; None unless these come from a scenario."""
    if not isinstance(prepared.division, Division):
        return None
    return prepared.division.pretraining


def shares_of(prepared: Prepared) -> Mapping[str, Indices]:
    """Return the indices of the training samples of each device with data, (samples,).

    Empty if all samples are at the coordinator.
    """
    if not isinstance(prepared.division, Division):
        return {}
    return prepared.division.shares


def samples_of(prepared: Prepared, dataset: Dataset, device: str) -> Dataset | None:
    """Return the training samples of a device, and on the coordinator the test samples; None without samples.

    With a method that supports ``all_samples``, every device of the plan has all samples. A split may add noise to a
    device's samples.
    """
    assert isinstance(prepared.method, Method)
    shares = shares_of(prepared)
    is_coordinator = device == prepared.plan.coordinator
    if "all_samples" in prepared.method.supports and device in prepared.plan.devices:
        return dataset
    if not shares:
        return dataset if is_coordinator else None
    own_indices = shares.get(device)
    if own_indices is not None:
        own_samples = dataset.subset(own_indices, tests=is_coordinator)
        return _add_noise(prepared, own_samples, device)
    if not is_coordinator:
        return None
    # A coordinator without training samples evaluates with the test samples.
    no_indices = np.empty(0, np.int64)
    return dataset.subset(no_indices, tests=True)


def _add_noise(prepared: Prepared, samples: Dataset, device: str) -> Dataset:
    """Return a device's samples with the noise of the split; unchanged samples for splits without noise."""
    split = workload_section(prepared.scenario).data.split
    if not isinstance(split, SplitPart) or split.noise is None:
        return samples
    # The i-th of n devices has the variance noise * i / n, as in the noise-based feature imbalance of "Federated
    # Learning on Non-IID Data Silos" (Li et al., 2022).
    owners = list(shares_of(prepared))
    position = 1 + owners.index(device)
    variance = split.noise * position / len(owners)
    seed = derive(prepared.problem.seed, "noise", device)
    return samples.with_noise(variance**0.5, seed)


def samples_by_class(prepared: Prepared) -> dict[str, dict[int, int]]:
    """Return the number of training samples by device and class; empty if all are at the coordinator.

    Labels other than classes count as class 0. Raises `InputError` for unreadable data.
    """
    shares = shares_of(prepared)
    if not shares:
        return {}
    scenario = prepared.scenario
    labels = data.train_labels(workload_section(scenario).data, data_folder(scenario))
    if not is_class(labels):
        labels = np.zeros(len(labels), np.int64)
    return class_counts(labels, shares)


def initial_weights(prepared: Prepared) -> Mapping[str, Any] | str:
    """Return the file and digest of the initial weights, or a text about the random initial weights."""
    assert isinstance(prepared.problem, PlanningProblem)
    file = weights_file(prepared.scenario)
    if file is not None:
        return weights.facts(file, prepared.problem.model)
    initialisation = prepared.problem.workload.initialisation
    if initialisation is None:
        return "random, drawn from the seed"
    return f"random ({initialisation}), drawn from the seed"


def export_weights(prepared: Prepared, outcome: Outcome) -> Outcome:
    """Return an outcome whose weights have the names of the user's own network; unchanged for catalogue models."""
    problem = prepared.problem
    assert isinstance(problem, PlanningProblem)
    if problem.model.builder is None:
        # The weights of a catalogue model are stored under the names of its units.
        return outcome
    device_weights = {}
    for device, packed in outcome.parts.items():
        tensors = {}
        for name, tensor in arrays.unpack(bytearray(packed)).items():
            name_in_network = weights.plain_name(name)
            tensors[name_in_network] = tensor
        device_weights[device] = arrays.pack(tensors)
    model_weights = None
    if outcome.weights is not None:
        # Tensors of the user's network that no unit uses have their initial values, drawn from the seed.
        exported = weights.export_state(outcome.weights, problem.model, problem.seed)
        model_weights = arrays.pack(exported)
    return replace(outcome, weights_file=model_weights, parts=device_weights)


def load_data(prepared: Prepared) -> Dataset:
    """Read the data set of a run; raises `InputError` for a number of samples unsuitable for the batches."""
    scenario = prepared.scenario
    workload = workload_section(scenario)
    assert isinstance(prepared.problem, PlanningProblem)
    is_timing_only = workload.numerics == "none"
    dataset = data.load(workload.data, data_folder(scenario), blank=is_timing_only)
    _check_sample_count(prepared, len(dataset.train_labels))
    if workload.data.augment is not None and not is_timing_only:
        dataset = _add_augmentation(prepared, dataset)
    return dataset if prepared.problem.model.integers else dataset.with_floats()


def _check_sample_count(prepared: Prepared, samples: int) -> None:
    """Raise `InputError` if the batches do not fit a number of training samples.

    `find_problems` and `divide` check this only for data whose number of samples is known before the files are read.
    """
    assert isinstance(prepared.method, Method)
    assert isinstance(prepared.problem, PlanningProblem)
    scenario = prepared.scenario
    problems = list(_batch_problems(workload_section(scenario), samples))
    if problems:
        raise scenario.source.error(problems)
    if prepared.problem.samples:
        # `divide` has read the labels, and checked the number of samples of each owner.
        return
    try:
        _check_last_batch_of(samples, prepared.method, prepared.problem)
    except InputError as error:
        raise scenario.source.error([_locate_error(error)]) from None


def _add_augmentation(prepared: Prepared, dataset: Dataset) -> Dataset:
    # Imported here, since the module imports torch, which many runs do not need on the controller.
    from testbed.ml.data.augment import make_augmentation

    scenario = prepared.scenario
    workload = workload_section(scenario)
    samples = len(dataset.train_labels)
    seed = prepared.problem.seed
    try:
        augmentation = make_augmentation(workload, seed, dataset.shape, samples)
    except InputError as error:
        raise scenario.source.error([_locate_error(error)]) from None
    return replace(dataset, augmentation=augmentation)


# Checks of a scenario


def find_problems(
    scenario: Scenario, method: core.Method | None
) -> Iterator[Diagnostic]:
    """Yield problems of the keys numerics, model and data, and of the data files.

    ``method`` is None for an unknown method, which `testbed.validation` reports.
    """
    workload = workload_section(scenario)
    if isinstance(method, Method):
        yield from _numerics_problems(workload, method)
    elif method is not None:
        text = f"'{method.name}' does not support models: derive it from testbed.ml.method.Method"
        yield Diagnostic(("workload", "method"), text)
    yield from _model_problems(workload.model)
    yield from _data_problems(scenario)
    yield from _folder_problems(scenario)


def _numerics_problems(workload: LearningPart, method: Method) -> Iterator[Diagnostic]:
    """Yield a problem if the method does not support timing-only runs, or devices computed together."""
    key: Key = ("workload", "numerics")
    if workload.numerics == "none" and "timing_only" not in method.supports:
        others = _methods_supporting("timing_only")
        text = f"the method '{method.name}' does not support timing-only runs: use full, or one of {others}"
        yield Diagnostic(key, text)
    if workload.numerics == "stacked" and "stacked" not in method.supports:
        others = _methods_supporting("stacked")
        text = f"the method '{method.name}' does not support 'stacked': use full, or one of {others}"
        yield Diagnostic(key, text)


def _methods_supporting(capability: core.Capability) -> str:
    """Return the names of the methods for training and inference with a capability."""
    names = []
    for method in methods.METHODS.values():
        if isinstance(method, Method) and capability in method.supports:
            names.append(method.name)
    return ", ".join(names)


def _model_problems(part: ModelPart) -> Iterator[Diagnostic]:
    """Yield problems of the name and options of a catalogue model."""
    key: Key = ("workload", "model")
    try:
        if part.file is not None or models.code_of(part.name) is not None:
            # `create_own` checks the user's own model, when the planning problem is made.
            return
    except InputError as error:
        yield _locate_error(error)
        return
    if part.units is not None:
        yield Diagnostic(
            (*key, "units"),
            "applies to your own model, given by `file`; catalogue models have fixed units",
        )
    try:
        options = models.find(part.name).Options
        options.model_validate(part.options())
    except InputError as error:
        yield _locate_error(error)
    except ValidationError as error:
        yield from explain(error, options, key)


def _locate_error(error: InputError) -> Diagnostic:
    """Convert an error, whose key is relative to ``workload``, to a diagnostic of the scenario."""
    return Diagnostic(("workload", *error.key), error.text)


def _data_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    """Yield problems of the key data, except for missing files of the catalogue."""
    workload = workload_section(scenario)
    part = workload.data
    try:
        source = data.describe_part(part, data_folder(scenario))
    except InputError as error:
        yield _locate_error(error)
        return
    if not source.classes and workload.task == "train":
        text = f"{part.name} has no labels for training: use the task infer, or data such as digits"
        yield Diagnostic(("workload", "data", "name"), text)
    if data.is_own(part):
        yield from _own_data_problems(scenario)
        return
    samples = data.known_samples(part)
    if samples is not None:
        yield from _batch_problems(workload, samples)
    yield from _path_problems(part, is_single_file=source.from_path)


def _path_problems(part: DataPart, *, is_single_file: bool) -> Iterator[Diagnostic]:
    """Yield a problem of the key path: catalogue sets of a single file need the key, and all others reject it."""
    key: Key = ("workload", "data")
    if is_single_file and part.path is None:
        text = f"{part.name} needs the file of an image: name it with `path`, or use the data set photos"
        yield Diagnostic(key, text)
    elif not is_single_file and part.path is not None:
        text = f"{part.name} is not read from a single file: use the data set image, or remove `path`"
        yield Diagnostic((*key, "path"), text)


def _own_data_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    """Yield problems of the user's own samples. Reads all labels."""
    workload = workload_section(scenario)
    try:
        labels = data.train_labels(workload.data, data_folder(scenario))
    except InputError as error:
        yield _locate_error(error)
        return
    yield from _batch_problems(workload, len(labels))
    are_numbers = labels.ndim == 1 and labels.dtype.kind == "f"
    if are_numbers and workload.training.loss.is_plain:
        text = "the labels are numbers, but cross-entropy needs classes: use a loss such as mse"
        yield Diagnostic(("workload", "training", "loss"), text)


def _batch_problems(workload: LearningPart, samples: int) -> Iterator[Diagnostic]:
    """Yield a problem for a batch larger than the training set, unless devices own the samples."""
    size = workload.batch_size
    is_at_coordinator = workload.data.split == "coordinator"
    if workload.task == "train" and is_at_coordinator and size > samples:
        text = f"a batch of {size} is more than the {samples} training samples: use at most {samples}"
        yield Diagnostic(("workload", "batch_size"), text)


def _folder_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    """Yield problems of the files of a catalogue set."""
    part = workload_section(scenario).data
    # `_data_problems` has reported unknown names and broken packages.
    with suppress(InputError):
        if data.is_own(part):
            return
        for key, text in data.problems(part, data_folder(scenario)):
            yield Diagnostic(("workload", "data", *key), text)


def divide(
    scenario: Scenario, method: Method, problem: PlanningProblem
) -> tuple[PlanningProblem, Division]:
    """Check everything independent of a plan, then divide the samples among the devices with data.

    Raises `InputError`.
    """
    _check_training(method, problem)
    _check_precision(method, problem)
    shares = _divide_samples(scenario, method, problem)
    samples = {}
    for name, share in shares.items():
        samples[name] = len(share)
    problem = replace(problem, samples=samples)
    _check_last_batch(method, problem)
    _check_normalisation(method, problem)
    try:
        pretraining = _pretraining(scenario, problem.model)
    except InputError as error:
        raise InputError(error.text, ("model", "weights")) from None
    return problem, Division(shares, pretraining)


def read_codes(scenario: Scenario, options: core.Options) -> dict[str, Code]:
    """Read the Python files named by the keys of training and of the method, by `NamedPart.title`.

    Raises `InputError`.
    """
    return _training_codes(scenario) | _option_codes(scenario, options)


def describe_data(scenario: Scenario) -> data.DataSource:
    """Describe the data; only the user's own data are read for the description. Raises `InputError`."""
    return data.describe_part(workload_section(scenario).data, data_folder(scenario))


def planned_total(scenario: Scenario) -> int | None:
    """Return the number of steps or requests; None if the number depends on data files, a split or the time."""
    workload = workload_section(scenario)
    # Only epochs depend on the number of samples.
    if workload.task != "train" or workload.steps is not None:
        return workload.total
    if workload.data.split != "coordinator":
        return None
    samples = data.known_samples(workload.data)
    if samples is None or workload.epochs is None:
        return None
    per_epoch = steps_per_epoch(
        samples, workload.batch_size, drop_last=workload.drop_last
    )
    return workload.epochs * per_epoch


def _check_training(method: Method, problem: PlanningProblem) -> None:
    """Raise `InputError` for initial weights or keys of training unsupported by the method."""
    has_weights = problem.workload.model.weights is not None
    if has_weights and "initial_weights" not in method.supports:
        text = f"'{method.name}' does not support initial weights: remove the key"
        raise InputError(text, ("model", "weights"))
    if problem.workload.task != "train":
        return
    problem.training.check()
    if problem.workload.training.uses_evaluations:
        _check_early_stopping(method, problem)
    used_keys = problem.workload.training.used_keys()
    for key, reason in method.refuses.items():
        if key in used_keys:
            text = f"'{method.name}' does not support this ({reason}): remove the key, or use another method"
            raise InputError(text, ("training", *key.split(".")))


def _check_early_stopping(method: Method, problem: PlanningProblem) -> None:
    """Raise `InputError` unless the method supports early stopping and evaluates after a number of steps or rounds."""
    if "early_stopping" not in method.supports:
        text = f"'{method.name}' does not support early stopping: remove 'until', 'patience' and 'best'"
        raise InputError(text, ("training",))
    # Only some methods have this option.
    interval = getattr(problem.options, "evaluate_every", None)
    if interval is None:
        text = "'until', 'patience' and 'best' require periodic evaluations: set evaluate_every"
        raise InputError(text, ("method",))
    # A float is a duration in seconds, an integer counts steps or rounds.
    if isinstance(interval, float):
        text = "'until', 'patience' and 'best' require evaluations at steps or rounds: set evaluate_every to an integer"
        raise InputError(text, ("method", "evaluate_every"))


def check_tied_weights(method: Method, problem: PlanningProblem, plan: Plan) -> None:
    """Raise `InputError` for a training plan that separates the units of a tied weight, which several units use.

    Methods with the capability ``tied_weights`` keep the copies of such a weight equal.
    """
    if problem.workload.task != "train" or "tied_weights" in method.supports:
        return
    for tied in problem.model.tied_weights:
        for assignment in plan.assignments:
            units = range(assignment.start, assignment.stop)
            assigned = [unit for unit in tied.units if unit in units]
            # An assignment with a `part` is a share of each unit, so the device lacks the rest of the weight.
            has_whole_units = assignment.part is None
            has_all_units = len(assigned) == len(tied.units)
            if assigned and not (has_all_units and has_whole_units):
                raise InputError(
                    f"the network uses one weight as {tied.title}, and '{method.name}' gives {assignment.device} only "
                    "a part of these layers: use pipeline, gpipe or model-parallelism, which add up the gradients of "
                    "copies, or untie the weight",
                    ("model",),
                )


def _check_precision(method: Method, problem: PlanningProblem) -> None:
    """Raise `InputError` for the precision of a device if unsupported by the method or the task."""
    for device in problem.devices:
        if device.precision == "f32":
            continue
        if "precisions" not in method.supports:
            text = f"'{method.name}' computes in float32: remove the key from {device.name}"
            raise InputError(text, ("devices", device.name, "precision"))
        if device.precision == "int8" and problem.workload.task == "train":
            text = f"int8 applies to weights that are not trained: use f16 or bf16 for {device.name}"
            raise InputError(text, ("devices", device.name, "precision"))


def _check_normalisation(method: Method, problem: PlanningProblem) -> None:
    """Raise `InputError` if batches have too few samples for the normalisation layers in training."""
    if problem.workload.task != "train":
        return
    # A device with fewer samples than a batch has smaller batches.
    device_samples = problem.samples.values()
    samples = min([method.samples_at_once(problem), *device_samples])
    for unit in problem.model.units:
        if samples < unit.min_samples:
            raise InputError(
                f"{unit.name} normalises over samples alone, and a batch of {samples} has no variance: "
                "use larger batches, or fewer micro-batches",
                ("batch_size",),
            )


def _check_last_batch(method: Method, problem: PlanningProblem) -> None:
    """Raise `InputError` if the method or the model does not support a smaller last batch of an epoch.

    If the number of samples is known only from the files of a catalogue set, `load_data` checks the last batch.
    """
    workload = problem.workload
    if workload.drop_last or workload.task != "train":
        return
    if "smaller_batches" not in method.supports:
        text = f"'{method.name}' requires batches of equal size: remove the key"
        raise InputError(text, ("drop_last",))
    sample_counts = list(problem.samples.values())
    if not sample_counts:
        # All samples are at the coordinator.
        coordinator_samples = data.known_samples(workload.data)
        if coordinator_samples:
            sample_counts = [coordinator_samples]
    for samples in sample_counts:
        _check_last_batch_of(samples, method, problem)


def _check_last_batch_of(
    samples: int, method: Method, problem: PlanningProblem
) -> None:
    """Raise `InputError` if the last batch of an epoch of ``samples`` samples is too small for a normalisation."""
    workload = problem.workload
    last_batch = samples % workload.batch_size
    if not last_batch or workload.drop_last or workload.task != "train":
        return
    # The last batch has as many micro-batches as the others, but at most as many as samples.
    micro_batches = workload.batch_size // method.samples_at_once(problem)
    smallest_micro_batch = last_batch // min(micro_batches, last_batch)
    needed = max(unit.min_samples for unit in problem.model.units)
    if smallest_micro_batch < needed:
        text = f"the last batch of {samples} samples has {last_batch}, too few to normalise: use another batch_size"
        raise InputError(text, ("drop_last",))


def model_code(scenario: Scenario) -> Code | None:
    """Read the source code of the model's file or package; None for a catalogue model. Raises `InputError`."""
    part = workload_section(scenario).model
    if part.file is None:
        return models.code_of(part.name)
    path = scenario.source.folder / part.file
    return usercode.read(path, part.name, MODEL_FILE_KEY)


def _training_codes(scenario: Scenario) -> dict[str, Code]:
    codes = {}
    for key, named in workload_section(scenario).training.parts():
        if named.file is not None:
            codes[named.title] = _read_code(scenario, named, ("training", key, "file"))
    return codes


def _option_codes(scenario: Scenario, options: BaseModel) -> dict[str, Code]:
    codes = {}
    for key, named in named_in(options, ("method",)):
        if named.file is not None:
            code = _read_code(scenario, named, key)
            codes[named.title] = code
            # Raises an error now, instead of on the devices, if the file lacks the named function or class.
            usercode.function(code, key)
    return codes


def _read_code(scenario: Scenario, named: NamedPart, key: Key) -> Code:
    path = scenario.source.folder / str(named.file)
    return usercode.read(path, named.name, key)


def _divide_samples(
    scenario: Scenario, method: Method, problem: PlanningProblem
) -> dict[str, Indices]:
    """Return the indices of the training samples of each owner, empty without a split; raises `InputError`."""
    part = problem.workload.data
    owners = method.data_owners(problem)
    _check_owners(method, problem, owners)
    if part.split == "coordinator":
        return {}
    folder = data_folder(scenario)
    labels = data.train_labels(part, folder)
    groups = data.train_groups(part, folder)
    classes = problem.model.classes
    return split_samples(labels, classes, owners, part.split, problem.seed, groups)


def _check_owners(
    method: Method, problem: PlanningProblem, owners: Sequence[str]
) -> None:
    """Raise `InputError` for a split with a method without data owners, and without a split for a method with them."""
    key: Key = ("data", "split")
    if problem.workload.data.split == "coordinator":
        if owners:
            text = f"the devices of '{method.name}' train on their own samples: use iid, or keys such as dirichlet"
            raise InputError(text, key)
        return
    if not owners:
        reason = f"'{method.name}' keeps all samples on its coordinator"
    elif problem.workload.task == "infer":
        reason = "an inference does not train"
    else:
        return
    text = f"distributes training samples among devices, but {reason}: remove the key"
    raise InputError(text, key)


def _pretraining(scenario: Scenario, model: Model) -> Prepared | None:
    """Check the file of initial weights; if it is a scenario, return the run that trains the weights, otherwise None.

    Raises `InputError`.
    """
    file = weights_file(scenario)
    if file is None:
        return None
    if not weights.is_scenario(file):
        weights.check(file, model)
        return None
    runs = trials(load(str(file), overrides=[]))
    if len(runs) > 1:
        raise InputError(
            f"{file}: has {len(runs)} runs: name a scenario of one run, without sweep and repetitions"
        )
    trial = runs[0]
    workload = trial.scenario.workload
    if not isinstance(workload, LearningPart) or workload.task != "train":
        raise InputError(f"{file}: does not train: name a scenario whose task is train")
    origin = workload.model.weights
    # Otherwise scenarios could name each other in a circle.
    if origin is not None and weights.is_scenario(Path(origin)):
        raise InputError(
            f"{file}: takes its own initial weights from a scenario: name a scenario with random weights or a file"
        )
    run = prepare(trial)
    assert isinstance(run.problem, PlanningProblem)
    _check_same_model(file, run.problem.model, model)
    return run


def _check_same_model(file: Path, pretrained: Model, model: Model) -> None:
    """Raise `InputError` unless the scenario of the initial weights, ``file``, trains the model of the run."""
    if pretrained.name != model.name:
        raise InputError(
            f"{file}: trains {pretrained.name}, not {model.name}: name a scenario with the same model"
        )
    if pretrained != model:
        raise InputError(
            f"{file}: trains another {model.name}: give both scenarios the same model, with the same options, and "
            "samples of the same shape"
        )

"""Checks, data and divisions before a run of training or inference; devices do not need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from testbed.ml.data.split import class_counts, is_class
from testbed.ml.data.split import split as shared
from testbed.ml.method import Method, Problem
from testbed.ml.models import catalog as models
from testbed.ml.models import weights
from testbed.ml.models.chain import Model
from testbed.ml.models.making import KEY as MODEL_FILE
from testbed.ml.training.schema import NamedPart, named_in
from testbed.ml.workload import LearningPart, ModelPart, SplitPart
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
    """Decisions before planning: the owners of samples, and the origin of initial weights."""

    shares: Mapping[str, Indices] = field(default_factory=dict)
    """Indices of the training samples of each device with data, (samples,); empty if all are at the coordinator."""
    pretraining: Prepared | None = None
    """The run producing the initial weights, if they come from a scenario."""


def part_of(scenario: Scenario) -> LearningPart:
    """Return the workload keys of a scenario for training or inference."""
    assert isinstance(scenario.workload, LearningPart)
    return scenario.workload


def data_folder(scenario: Scenario) -> Path:
    """Return the folder of the data files: the scenario's, or the target of `testbed data fetch`."""
    part = part_of(scenario).data
    if (named := part.file or part.path or part.folder) is not None:
        return scenario.source.folder / named
    return data.data_place(part.name)


def weights_file(scenario: Scenario) -> Path | None:
    """Return the file of the model's initial weights; None if they are drawn from the seed."""
    named = part_of(scenario).model.weights
    return None if named is None else scenario.source.folder / named


def pretraining_of(prepared: Prepared) -> Prepared | None:
    """Return the run producing the initial weights; None unless they come from a scenario."""
    return (
        prepared.division.pretraining
        if isinstance(prepared.division, Division)
        else None
    )


def shares_of(prepared: Prepared) -> Mapping[str, Indices]:
    """Return the indices of the training samples of each device with data; empty if all are at the coordinator."""
    return prepared.division.shares if isinstance(prepared.division, Division) else {}


def share(prepared: Prepared, dataset: Dataset, device: str) -> Dataset | None:
    """Return the samples of a device: its own training samples, and test samples on the coordinator.

    A method may place all samples on all devices. None for a device without samples.
    """
    assert isinstance(prepared.method, Method)
    shares, lead = shares_of(prepared), device == prepared.plan.lead
    if "all_samples" in prepared.method.supports and device in prepared.plan.devices:
        return dataset
    if not shares:
        return dataset if lead else None
    own = shares.get(device)
    if own is None and not lead:
        return None
    part = dataset.part(np.empty(0, np.int64) if own is None else own, lead)
    split = part_of(prepared.scenario).data.split
    if own is None or not isinstance(split, SplitPart) or split.noise is None:
        return part
    place = 1 + list(shares).index(device)
    seed = derive(prepared.problem.seed, "noise", device)
    return part.noisy((split.noise * place / len(shares)) ** 0.5, seed)


def owned(prepared: Prepared) -> dict[str, dict[int, int]]:
    """Return the number of training samples by device and class; empty if all are at the coordinator.

    Labels other than classes count as class 0. Raises `InputError` for unreadable data.
    """
    shares = shares_of(prepared)
    if not shares:
        return {}
    labels = data.train_labels(
        part_of(prepared.scenario).data, data_folder(prepared.scenario)
    )
    return class_counts(
        labels if is_class(labels) else np.zeros(len(labels), np.int64), shares
    )


def initial_weights(prepared: Prepared) -> Mapping[str, Any] | str:
    """Return the file of the initial weights with its digest, or the initialisation of drawn ones."""
    assert isinstance(prepared.problem, Problem)
    file = weights_file(prepared.scenario)
    if file is not None:
        return weights.facts(file, prepared.problem.model)
    text, drawn = (
        "random, drawn from the seed",
        prepared.problem.workload.initialisation,
    )
    return text if drawn is None else f"{text} as of {drawn}"


def exported(prepared: Prepared, outcome: Outcome) -> Outcome:
    """Return an outcome whose weights have the names of the user's own network, if there is one."""
    problem = prepared.problem
    assert isinstance(problem, Problem)
    if problem.model.builder is None:
        return outcome
    parts = {}
    for device, part in outcome.parts.items():
        held = arrays.unpack(bytearray(part))
        parts[device] = arrays.pack(
            {weights.plain_name(name): tensor for name, tensor in held.items()}
        )
    whole = None
    if outcome.weights is not None:
        whole = arrays.pack(
            weights.exported(outcome.weights, problem.model, problem.seed)
        )
    return replace(outcome, weights_file=whole, parts=parts)


def load_data(prepared: Prepared) -> Dataset:
    """Return the samples of an experiment; raises `InputError` if a batch exceeds the data set."""
    scenario, workload = prepared.scenario, part_of(prepared.scenario)
    assert isinstance(prepared.problem, Problem)
    dataset = data.load(
        workload.data, data_folder(scenario), blank=workload.numerics == "none"
    )
    if wrong := list(batch_problems(workload, len(dataset.train_labels))):
        # Of data in files nobody has counted the samples before.
        raise scenario.source.error(wrong)
    if workload.data.augment is not None and workload.numerics != "none":
        from testbed.ml.data.augment import drawing

        drawn = (
            workload,
            prepared.problem.seed,
            dataset.shape,
            len(dataset.train_labels),
        )
        try:
            dataset = replace(dataset, drawing=drawing(*drawn))
        except InputError as error:
            raise scenario.source.error(
                [Diagnostic(("workload", *error.key), error.text)]
            ) from None
    return dataset if prepared.problem.model.integers else dataset.floats()


def _numerics_problems(workload: LearningPart, method: Method) -> Iterator[Diagnostic]:
    key: Key = ("workload", "numerics")
    if workload.numerics == "none" and "timing_only" not in method.supports:
        can = ", ".join(
            each.name for each in _learning_methods() if "timing_only" in each.supports
        )
        text = f"the method '{method.name}' does not support timing-only runs: use full, or one of {can}"
        yield Diagnostic(key, text)
    if workload.numerics == "stacked" and "stacked" not in method.supports:
        can = ", ".join(
            each.name for each in _learning_methods() if "stacked" in each.supports
        )
        yield Diagnostic(key, f"'stacked' is for methods such as {can}: use full")


def _learning_methods() -> list[Method]:
    return [each for each in methods.METHODS.values() if isinstance(each, Method)]


def _model_problems(part: ModelPart) -> Iterator[Diagnostic]:
    key: Key = ("workload", "model")
    try:
        if part.file is not None or models.code_of(part.name) is not None:
            return  # it is made, or refused, with the problem
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
    """Return the problem of a workload, with its key."""
    return Diagnostic(("workload", *error.key), error.text)


def _data_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    name = part_of(scenario).data.name
    key: Key = ("workload", "data")
    try:
        kind = data.describe_part(part_of(scenario).data, data_folder(scenario))
    except InputError as error:
        yield _locate_error(error)
        return
    if not kind.classes and part_of(scenario).task == "train":
        yield Diagnostic(
            (*key, "name"),
            f"{name} has no labels for training: use the task infer, or data such as digits",
        )
    path = part_of(scenario).data.path
    if data.is_own(part_of(scenario).data):
        try:
            labels = data.train_labels(part_of(scenario).data, data_folder(scenario))
            yield from batch_problems(part_of(scenario), len(labels))
            if (
                labels.ndim == 1
                and labels.dtype.kind == "f"
                and part_of(scenario).training.loss.plain
            ):
                text = "the labels are numbers, but cross-entropy needs classes: use a loss such as mse"
                yield Diagnostic(("workload", "training", "loss"), text)
        except InputError as error:
            yield _locate_error(error)
        return
    there = data.known_samples(part_of(scenario).data)
    if there is not None:
        yield from batch_problems(part_of(scenario), there)
    if kind.from_path and path is None:
        yield Diagnostic(
            key, f"{name} is your own image: give its file with `path`, or use photos"
        )
    elif not kind.from_path and (
        path is not None or part_of(scenario).data.file is not None
    ):
        yield Diagnostic(
            (*key, "path"),
            f"{name} is not read from a single file: use the data set image, or remove `path`",
        )


def batch_problems(workload: LearningPart, there: int) -> Iterator[Diagnostic]:
    """Yield the problem of a batch larger than all training samples, if the coordinator has them."""
    size = workload.batch_size
    if workload.task == "train" and workload.data.split == "lead" and size > there:
        text = f"a batch of {size} is more than the {there} training samples: use at most {there}"
        yield Diagnostic(("workload", "batch_size"), text)


def _folder_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    """Check the data files. `build_problem` omits this check: devices receive their data and lack the folder."""
    part = part_of(scenario).data
    with suppress(
        InputError
    ):  # `_data_problems` reports unknown names and broken packages
        if data.is_own(part):
            return
        for key, text in data.problems(part, data_folder(scenario)):
            yield Diagnostic(("workload", "data", *key), text)


def problems(scenario: Scenario, method: core.Method | None) -> Iterator[Diagnostic]:
    """Yield problems of numerics, model, data and folders."""
    workload = part_of(scenario)
    if isinstance(method, Method):
        yield from _numerics_problems(workload, method)
    elif method is not None:
        text = f"'{method.name}' does not support models: derive it from testbed.ml.method.Method"
        yield Diagnostic(("workload", "method"), text)
    yield from _model_problems(workload.model)
    yield from _data_problems(scenario)
    yield from _folder_problems(scenario)


def divide(
    scenario: Scenario, method: Method, problem: Problem
) -> tuple[Problem, Division]:
    """Divide the samples among the devices with data, and check everything independent of a plan; raises
    `InputError`.
    """
    _check_training(method, problem)
    _check_precision(method, problem)
    shares = _divide_samples(scenario, method, problem)
    problem = replace(
        problem, samples={name: len(share) for name, share in shares.items()}
    )
    _check_last_batch(method, problem)
    _check_normalisation(method, problem)
    try:
        return problem, Division(shares, _pretraining(scenario, problem.model))
    except InputError as error:
        raise InputError(error.text, ("model", "weights")) from None


def codes_of(scenario: Scenario, options: core.Options) -> dict[str, Code]:
    """Return the texts of files named by the training and by method options. Raises `InputError`."""
    return training_codes(scenario) | _option_codes(scenario, options)


def described_data(scenario: Scenario) -> data.DataSource:
    """Describe the data with a minimum of reading. Raises `InputError`."""
    return data.describe_part(part_of(scenario).data, data_folder(scenario))


def total(scenario: Scenario) -> int | None:
    """Return the number of steps or requests; None if the number depends on the data files or on the split."""
    workload = part_of(scenario)
    if workload.task != "train" or workload.steps is not None:
        return workload.total
    if workload.data.split != "lead":
        return None
    samples = data.known_samples(workload.data)
    if samples is None or workload.epochs is None:
        return None
    return workload.epochs * steps_per_epoch(
        samples, workload.batch_size, workload.drop_last
    )


def _check_training(method: Method, problem: Problem) -> None:
    if (
        problem.workload.model.weights is not None
        and "initial_weights" not in method.supports
    ):
        text = f"'{method.name}' does not support initial weights: remove the key"
        raise InputError(text, ("model", "weights"))
    if problem.workload.task != "train":
        return
    problem.training.check()
    part = problem.workload.training
    if part.judged and "early_stopping" not in method.supports:
        text = f"'{method.name}' does not support early stopping: remove 'until', 'patience' and 'best'"
        raise InputError(text, ("training",))
    if part.judged and getattr(problem.options, "evaluate_every", None) is None:
        text = "'until', 'patience' and 'best' require periodic evaluations: set evaluate_every"
        raise InputError(text, ("method",))
    if part.judged and isinstance(
        getattr(problem.options, "evaluate_every", None), float
    ):
        text = "'until', 'patience' and 'best' require evaluations at steps or rounds: set evaluate_every to an integer"
        raise InputError(text, ("method", "evaluate_every"))
    given = part.given()
    for key, reason in method.refuses.items():
        if key in given:
            text = f"'{method.name}' does not support this ({reason}): remove the key, or use another method"
            raise InputError(text, ("training", *key.split(".")))


def check_tied(method: Method, problem: Problem, plan: Plan) -> None:
    """Reject a plan separating units with a shared trained weight, unless the method ties copies; raises
    `InputError`.
    """
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
            text = f"'{method.name}' computes in float32: remove the key from {device.name}"
            raise InputError(text, ("devices", device.name, "precision"))
        if device.precision == "int8" and problem.workload.task == "train":
            text = f"int8 applies to weights that are not trained: use f16 or bf16 for {device.name}"
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
    """Raise `InputError` for an incomplete last batch if the method or the model does not support its size."""
    workload, key = problem.workload, ("drop_last",)
    if workload.drop_last or workload.task != "train":
        return
    if "smaller_batches" not in method.supports:
        raise InputError(
            f"'{method.name}' requires batches of equal size: remove the key", key
        )
    known = data.known_samples(workload.data)
    counts = [*problem.samples.values()] or ([known] if known else [])
    parts = workload.batch_size // method.samples_at_once(problem)
    needed = max(unit.least_samples for unit in problem.model.units)
    for count in counts:
        last = count % workload.batch_size
        if last and last // min(parts, last) < needed:
            text = f"the last batch of {count} samples has {last}, too few to normalise: use another batch_size"
            raise InputError(text, key)


def model_code(scenario: Scenario) -> Code | None:
    """Return the text of the model's file or package; None for a catalogue model. Raises `InputError`."""
    part = part_of(scenario).model
    if part.file is None:
        return models.code_of(part.name)
    return usercode.read(scenario.source.folder / part.file, part.name, MODEL_FILE)


def training_codes(scenario: Scenario) -> dict[str, Code]:
    """Return the texts of files named by the training, by title. Raises `InputError`."""
    named = [
        (("training", key, "file"), part)
        for key, part in part_of(scenario).training.parts()
    ]
    return {
        part.title: _read_code(scenario, part, key)
        for key, part in named
        if part.file is not None
    }


def _option_codes(scenario: Scenario, options: BaseModel) -> dict[str, Code]:
    """Return the texts of files named by the method's options. Raises `InputError`, also for a missing definition."""
    texts = {}
    for key, part in named_in(options, ("method",)):
        if part.file is not None:
            texts[part.title] = _read_code(scenario, part, key)
            usercode.function(texts[part.title], key)
    return texts


def _read_code(scenario: Scenario, part: NamedPart, key: Key) -> Code:
    return usercode.read(scenario.source.folder / str(part.file), part.name, key)


def _divide_samples(
    scenario: Scenario, method: Method, problem: Problem
) -> dict[str, Indices]:
    """Return the owners of training samples; empty if all are at the coordinator. Raises `InputError`.

    Labels are read for split data only. `build_problem` omits this step: devices receive their samples.
    """
    part, key = problem.workload.data, ("data", "split")
    owners = method.data_owners(problem)
    if part.split == "lead":
        if owners:
            text = f"the devices of '{method.name}' train on their own samples: use iid, or keys such as dirichlet"
            raise InputError(text, key)
        return {}
    if not owners or problem.workload.task == "infer":
        reason = (
            "an inference does not train"
            if owners
            else f"'{method.name}' keeps all samples on its coordinator"
        )
        raise InputError(
            f"distributes training samples among devices, but {reason}: remove the key",
            key,
        )
    labels = data.train_labels(part, data_folder(scenario))
    groups = data.train_groups(part, data_folder(scenario))
    return shared(
        labels, problem.model.classes, owners, part.split, problem.seed, groups
    )


def _pretraining(scenario: Scenario, model: Model) -> Prepared | None:
    """Check the weights file, and return the run to train the weights if the file is a scenario.

    `build_problem` omits this step: devices receive their weights and lack the file. Raises `InputError`.
    """
    file = weights_file(scenario)
    if file is None:
        return None
    if not weights.is_scenario(file):
        weights.check(file, model)
        return None
    runs = trials(load(str(file), []))
    first = runs[0].scenario
    if len(runs) > 1:
        raise InputError(
            f"{file}: has {len(runs)} runs: name a scenario of one, without sweep and repetitions"
        )
    if not isinstance(first.workload, LearningPart) or first.workload.task != "train":
        raise InputError(f"{file}: does not train: name a scenario whose task is train")
    if first.workload.model.weights is not None and weights.is_scenario(
        Path(first.workload.model.weights)
    ):
        raise InputError(
            f"{file}: takes its own initial weights from a scenario: name one with another origin"
        )
    run = prepare(runs[0])
    assert isinstance(run.problem, Problem)
    other = run.problem.model
    if other != model:
        raise InputError(
            f"{file}: trains another {model.name}: give both scenarios the same model, with the same options, and "
            "samples of the same shape"
            if other.name == model.name
            else f"{file}: trains {other.name}, not {model.name}: name a scenario with the same model"
        )
    return run

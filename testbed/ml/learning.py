"""Training and inference as workloads: a model, data owned by devices, and initial weights.

The controller describes a run by a `PlanningProblem`, which contains the model without weights. It sends the facts of
the problem to the devices, and each device rebuilds the problem. Before the run, the devices receive their samples and
the coordinator the initial weights, if the scenario names any.

Some parameters of a model may be frozen, which means that the training does not change them. If a method's devices keep
their units for the whole run (the capability ``fixed_units``), the frozen weights of `model.weights` are placed: every
device receives them before the run, and no message contains them. The other weights are the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from testbed import method as core
from testbed.common.collector import keep_imports
from testbed.common.errors import Diagnostic, InputError
from testbed.common.lazy import Lazy
from testbed.common.seeds import derive
from testbed.common.usercode import Code
from testbed.ml import kernels
from testbed.ml.fields import Fields, InputSpec
from testbed.ml.lazy import torch
from testbed.ml.method import Method, PlanningProblem, ProgramContext
from testbed.ml.models import create
from testbed.ml.models.chain import Model
from testbed.ml.models.own import create_own
from testbed.ml.workload import LearningPart
from testbed.plan import Plan
from testbed.trace.outcome import Outcome
from testbed.wire import arrays
from testbed.work import WorkloadPart
from testbed.workload import Inputs, Prepared, Workload

if TYPE_CHECKING:
    from testbed.ml import preparation
    from testbed.ml.data.dataset import Dataset
    from testbed.scenario.schema import Scenario
else:
    # Devices prepare nothing.
    preparation = Lazy("testbed.ml.preparation")

Weights = Mapping[str, "torch.Tensor"]
"""Weights by their names in the module that `Model.build` returns."""


class Facts(BaseModel):
    """The facts about model and data needed by a device to rebuild the planning problem."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    shape: tuple[int, ...]
    """Shape of a sample."""
    classes: int
    integers: bool
    """Whether the inputs of the model are integers, such as tokens."""
    fields: Fields = ()
    """The inputs of a sample, if there are several."""
    samples: dict[str, int] = {}
    """Training samples by device, for devices with data."""
    model_code: Code | None = None
    """Source text of a user's model."""
    codes: dict[str, Code] = {}
    """Source texts of the user's files that the keys of training and of the method name, by `NamedPart.title`."""


class Learning(Workload):
    """Common base of training and inference; `task` of the workload's keys distinguishes the two."""

    Part = LearningPart
    arrays = "torch"

    def problems(
        self, scenario: Scenario, method: core.Method | None
    ) -> Iterator[Diagnostic]:
        """Yield problems of the keys numerics, model and data, and of the data files."""
        return preparation.find_problems(scenario, method)

    def extend_problem(
        self,
        base_problem: core.PlanningProblem,
        scenario: Scenario,
        method: core.Method,
    ) -> PlanningProblem:
        """Describe the data and create the model, without weights."""
        workload = preparation.workload_section(scenario)
        codes = preparation.read_codes(scenario, base_problem.options)
        source = preparation.describe_data(scenario)
        model_code = preparation.model_code(scenario)
        model = model_of(workload, model_code, source.classes, source.input_spec)
        # `divide` adds the number of samples of each device.
        no_samples: dict[str, int] = {}
        return _extend_problem(
            base_problem, method, model, no_samples, codes, model_code
        )

    def divide(
        self,
        scenario: Scenario,
        method: core.Method,
        problem: core.PlanningProblem,
    ) -> tuple[PlanningProblem, preparation.Division]:
        """Divide the samples among the devices with data, and check everything independent of a plan."""
        assert isinstance(method, Method)
        assert isinstance(problem, PlanningProblem)
        return preparation.divide(scenario, method, problem)

    def check(
        self,
        method: core.Method,
        problem: core.PlanningProblem,
        plan: Plan,
    ) -> None:
        """Raise `InputError` for a training plan separating the units of a tied weight, if unsupported."""
        assert isinstance(method, Method)
        assert isinstance(problem, PlanningProblem)
        preparation.check_tied_weights(method, problem, plan)

    def hint(self, problem: core.PlanningProblem, error: InputError) -> str:
        """Return why the user's network has no more units, if a plan failed because of too many stages."""
        assert isinstance(problem, PlanningProblem)
        reasons = problem.model.undivided_reasons
        is_about_stages = error.key[-1:] == ("stages",)
        return reasons[0] if is_about_stages and reasons else ""

    def total(self, scenario: Scenario) -> int | None:
        """Return the number of steps or requests; None if the number depends on the data files or on the split."""
        return preparation.planned_total(scenario)

    def facts(self, problem: core.PlanningProblem) -> Mapping[str, Any]:
        """Return the facts of the model and the data, the fields of `Facts`, as plain values."""
        assert isinstance(problem, PlanningProblem)
        model = problem.model
        fields = TypeAdapter(Fields).dump_python(model.fields, mode="json")
        codes = {}
        for name, code in problem.codes.items():
            codes[name] = code.model_dump(mode="json")
        model_code = None
        if problem.model_code is not None:
            model_code = problem.model_code.model_dump(mode="json")
        return {
            "shape": model.input,
            "classes": model.classes,
            "integers": model.integers,
            "fields": fields,
            "samples": dict(problem.samples),
            "model_code": model_code,
            "codes": codes,
        }

    def rebuild_problem(
        self,
        base_problem: core.PlanningProblem,
        method: core.Method,
        facts: Mapping[str, Any],
    ) -> PlanningProblem:
        """Return the problem on a device, with a model created from the facts."""
        known = Facts.model_validate(facts)
        assert isinstance(base_problem.workload, LearningPart)
        input_spec = InputSpec(known.shape, known.integers, known.fields)
        model = model_of(
            base_problem.workload, known.model_code, known.classes, input_spec
        )
        return _extend_problem(
            base_problem, method, model, known.samples, known.codes, known.model_code
        )

    def begin(self, workload: WorkloadPart) -> None:
        """Select torch's kernels for a reproducible workload."""
        # Torch reads the environment variables when it is imported, which is later.
        if workload.is_reproducible:
            kernels.fix()

    def load(self, prepared: Prepared) -> Dataset:
        """Read the samples; raises `InputError` for a batch larger than the data set."""
        return preparation.load_data(prepared)

    def inputs(
        self,
        prepared: Prepared,
        data: Any,
        weights: Weights | None,
    ) -> LearningInputs:
        """Return the samples and initial weights of the devices."""
        return LearningInputs(prepared, data, weights)

    def prepare_device(self, problem: core.PlanningProblem) -> dict[str, Any] | None:
        """Import torch and select the kernels; return processor and torch version."""
        assert isinstance(problem, PlanningProblem)
        import_torch()
        kernels.switch(reproducible=problem.workload.reproducible)
        return kernels.computing()

    def read_data(self, body: bytearray) -> Dataset:
        """Read the samples written by `LearningInputs.data`."""
        from testbed.ml.data.dataset import unpack

        return unpack(body)

    def program_context(
        self,
        device: str,
        problem: core.PlanningProblem,
        plan: Plan,
        data: Any,
        weights: Weights | None,
        on_weights: Callable[[], None],
    ) -> ProgramContext:
        """Return the context with the device's samples; placed frozen weights become part of the model."""
        assert isinstance(problem, PlanningProblem)
        frozen = placed_frozen_weights(problem, weights)
        return _make_context(device, problem, plan, data, weights, frozen, on_weights)

    @contextmanager
    def _fixed_computation(self, problem: PlanningProblem) -> Iterator[None]:
        with (
            # A container computes with one thread, and sums by several threads have another rounding.
            kernels.one_thread(),
            torch.random.fork_rng(devices=[]),
            kernels.fixed_kernels(reproducible=problem.workload.reproducible),
        ):
            torch.manual_seed(derive(problem.seed, "torch"))
            yield

    def simulation_context(
        self, problem: core.PlanningProblem
    ) -> AbstractContextManager[None]:
        """Seed torch, restrict torch to one thread, and select the kernels for a reproducible workload."""
        assert isinstance(problem, PlanningProblem)
        return self._fixed_computation(problem)

    def initial_weights(self, prepared: Prepared) -> Mapping[str, Any] | str:
        """Return the file and digest of the initial weights, or a text about the random initial weights."""
        return preparation.initial_weights(prepared)

    def sample_counts(self, prepared: Prepared) -> Mapping[str, Mapping[int, int]]:
        """Return the number of training samples by device and class."""
        return preparation.samples_by_class(prepared)

    def export_outcome(self, prepared: Prepared, outcome: Outcome) -> Outcome:
        """Return an outcome whose weights have the names of the user's own network; else the outcome unchanged."""
        return preparation.export_weights(prepared, outcome)

    def library_versions(self) -> dict[str, Any] | None:
        """Return processor, instruction set and torch version."""
        return kernels.computing()


class Training(Learning):
    """Training of a model."""

    name = "train"


class Inference(Learning):
    """Inference with a model."""

    name = "infer"


class LearningInputs(Inputs):
    """Samples of their owners, initial weights of the coordinator, and placed frozen weights of every device."""

    def __init__(
        self,
        prepared: Prepared,
        dataset: Dataset | None,
        weights: Weights | None,
    ) -> None:
        assert isinstance(prepared.problem, PlanningProblem)
        self._prepared = prepared
        self._problem: PlanningProblem = prepared.problem
        self._dataset = dataset
        self._weights = weights
        self._frozen = placed_frozen_weights(self._problem, weights)
        self.begins_with_weights = weights is not None

    def program_context(
        self,
        device: str,
        problem: core.PlanningProblem,
        plan: Plan,
        on_weights: Callable[[], None],
        shared: Any = None,
    ) -> ProgramContext:
        """Return the context with the samples owned by a device."""
        assert isinstance(problem, PlanningProblem)
        is_coordinator = device == self._prepared.plan.coordinator
        weights = self._weights if is_coordinator else None
        context = _make_context(
            device,
            problem,
            plan,
            self._samples_of(device),
            weights,
            self._frozen,
            on_weights,
        )
        return replace(context, shared=shared)

    def _samples_of(self, device: str) -> Dataset | None:
        if self._dataset is None:
            return None
        return preparation.samples_of(self._prepared, self._dataset, device)

    def data(self, device: str) -> bytes | None:
        """Return the samples owned by a device, augmented samples for all epochs; None without samples."""
        from testbed.ml.data.dataset import pack

        own_samples = self._samples_of(device)
        return None if own_samples is None else pack(own_samples)

    def weights(self, device: str) -> bytes | None:
        """Return all initial weights for the coordinator, and the placed frozen weights for other devices."""
        is_coordinator = device == self._prepared.plan.coordinator
        if is_coordinator and self._weights is not None:
            return arrays.pack(self._weights)
        return self._frozen_body

    # Cached, since all devices receive the same bytes.
    @cached_property
    def _frozen_body(self) -> bytes | None:
        return arrays.pack(self._frozen) if self._frozen else None

    def complete(self, weights: bytes) -> bytes:
        """Add the frozen weights, which no message contains, to the weights of a finished run."""
        return _add_frozen_weights(self._problem, weights, self._weights)


def _extend_problem(
    base_problem: core.PlanningProblem,
    method: core.Method,
    model: Model,
    samples: Mapping[str, int],
    codes: Mapping[str, Code],
    model_code: Code | None,
) -> PlanningProblem:
    """Extend a problem by model, samples by device, and source texts of the user's files."""
    assert isinstance(base_problem.workload, LearningPart)
    return PlanningProblem(
        devices=base_problem.devices,
        links=base_problem.links,
        workload=base_problem.workload,
        options=base_problem.options,
        seed=base_problem.seed,
        model=model,
        samples=samples,
        codes=codes,
        model_code=model_code,
        frozen_placed="fixed_units" in method.supports,
    )


def _make_context(
    device: str,
    problem: PlanningProblem,
    plan: Plan,
    dataset: Dataset | None,
    weights: Weights | None,
    frozen: Weights,
    on_weights: Callable[[], None],
) -> ProgramContext:
    """Return the context of a device's program.

    Args:
        device: name of the device.
        problem: the planning problem.
        plan: the plan of the run.
        dataset: the samples that the device owns; None without samples.
        weights: on the coordinator, all initial weights; None for weights drawn from the seed.
        frozen: the frozen weights placed on every device, which become part of the model.
        on_weights: called when the program reads the weights.
    """
    trained = None
    if device == plan.coordinator and weights is not None:
        trained = {}
        for name, tensor in weights.items():
            if name not in frozen:
                trained[name] = tensor
    return ProgramContext(
        problem=_with_frozen_weights(problem, frozen),
        plan=plan,
        dataset=dataset,
        given=trained,
        on_weights=on_weights,
    )


def placed_frozen_weights(
    problem: PlanningProblem, weights: Weights | None
) -> dict[str, torch.Tensor]:
    """Return the frozen ones of the initial weights if they are placed; empty if messages contain all weights."""
    model = problem.model
    if (
        weights is None
        or problem.training.frozen_travels
        or not model.frozen_parameters
    ):
        return {}
    from testbed.ml.models.modules import frozen_names

    # Only the names are needed. Tensors on the meta device have no values, so no weights are drawn.
    with torch.device("meta"):
        module = model.build(0, len(model.units), seed=0)
    names = frozen_names(module)
    return {name: tensor for name, tensor in weights.items() if name in names}


def _with_frozen_weights(problem: PlanningProblem, frozen: Weights) -> PlanningProblem:
    """Return a problem whose model has these frozen weights instead of weights drawn from the seed."""
    if not frozen:
        return problem
    return replace(problem, model=replace(problem.model, frozen_state=frozen))


def _add_frozen_weights(
    problem: PlanningProblem, trained: bytes, initial: Weights | None
) -> bytes:
    """Add the frozen weights to the trained weights of a finished run; both are safetensors.

    ``initial`` are the initial weights of the scenario, if it names any. Nothing is added if messages contain the
    frozen weights, since these are among the trained weights then.
    """
    model = problem.model
    if problem.training.frozen_travels or not model.frozen_parameters:
        return trained
    from testbed.ml.models.modules import frozen_names

    frozen_initial = placed_frozen_weights(problem, initial)
    completed = _with_frozen_weights(problem, frozen_initial)
    # Frozen weights without an initial value are drawn from the seed, as on the devices.
    module = completed.model.build(0, len(model.units), problem.seed)
    frozen = frozen_names(module)
    weights = arrays.unpack(bytearray(trained))
    for name, tensor in module.state_dict().items():
        if name in frozen:
            weights[name] = tensor
    return arrays.pack(weights)


def model_of(
    workload: LearningPart,
    code: Code | None,
    classes: int,
    input_spec: InputSpec,
) -> Model:
    """Create a workload's model, without weights; raises `InputError` for keys unknown to the model.

    ``code`` is the source text of a user's network, None for a catalogue model. ``classes`` and ``input_spec`` describe
    the data.
    """
    part = workload.model
    lora = workload.training.lora
    if code is None:
        if lora is not None:
            text = f"'{part.title}' is built from layer descriptions, but adapters need a network from a 'file'"
            raise InputError(text, ("training", "lora"))
        model = create(part.name, part.options(), input_spec.shape, classes)
        return model.with_initialisation(workload.initialisation or "lecun")
    if workload.initialisation is not None:
        text = f"'{part.title}' initialises its own weights: remove the key, and initialise the weights in its file"
        raise InputError(text, ("initialisation",))
    return create_own(
        code,
        part.options(),
        input_spec.shape,
        classes,
        part.units,
        integers=input_spec.integers,
        fields=input_spec.fields,
        lora=lora,
    )


@cache
def import_torch() -> None:
    """Import torch and trigger torch's lazy setup, to keep the setup out of a program's first batch."""
    with keep_imports():
        torch.set_num_threads(1)
        # Torch loads the kernels of an operation at the first use, so this uses the most common operations.
        image = torch.zeros(1, 1, 4, 4)
        kernel = torch.zeros(1, 1, 3, 3, requires_grad=True)
        convolved = torch.nn.functional.conv2d(image, kernel)
        convolved.flatten(1).log_softmax(1).sum().backward()  # type: ignore[no-untyped-call]

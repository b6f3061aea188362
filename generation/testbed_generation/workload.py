"""The workload ``generate``: its keys in a scenario, its planning problem, and the data and weights of devices.

Modules that need torch are imported in functions, since planning and runs with ``numerics: none`` work without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from testbed.common.errors import Diagnostic, InputError
from testbed.common.part import ConfigModel
from testbed.common.quantities import ByteRate, Duration
from testbed.method import Method, PlanningProblem, ProblemOptions, ProgramContext
from testbed.plan import DetailsType, Plan
from testbed.work import WorkloadPart
from testbed.workload import Inputs, Prepared, Workload
from testbed_generation.architecture import PRESETS, Architecture, preset
from testbed_generation.costs import CostModel
from testbed_generation.formats import Format
from testbed_generation.metrics import GENERATION
from testbed_generation.requests import Request, arrival_times, random_prompt

if TYPE_CHECKING:
    import torch

    from testbed.scenario.schema import Scenario
    from testbed_generation.tokens import Tokenizer


PROGRAM_MODULES = (
    "decoding",
    "gather",
    "pipeline",
    "programs",
    "stage",
    "tensor_parallel",
)
"""Modules that the programs of methods import, by their names within the package; devices import them before a run."""


class LanguageModelPart(ConfigModel):
    """A decoder-only transformer of the Llama family, given by a preset or by its shape."""

    preset: str | None = Field(
        None, description=f"a published shape: {', '.join(PRESETS)}"
    )
    layers: int | None = Field(None, ge=1, description="default: the preset's")
    width: int | None = Field(
        None,
        ge=2,
        description="activations of a token between layers; default: the preset's",
    )
    heads: int | None = Field(
        None, ge=1, description="query heads; default: the preset's"
    )
    kv_heads: int | None = Field(
        None, ge=1, description="key and value heads; default: the preset's, or as many"
    )
    hidden: int | None = Field(
        None,
        ge=1,
        description="hidden activations of the feed-forward network; default: the preset's",
    )
    vocabulary: int | None = Field(
        None, ge=256, description="number of tokens; default: the preset's"
    )
    context: int | None = Field(
        None, ge=1, description="tokens of the longest sequence; default: the preset's"
    )
    rope_base: float | None = Field(
        None, gt=1, description="base of the rotary positions; default: the preset's"
    )
    tied: bool | None = Field(
        None,
        description="whether the output matrix is the embedding; default: the preset's",
    )
    storage: Format = Field(
        "f32",
        description="format of stored weights; it determines bytes and times, and computed values do not depend on it",
    )
    weights: str | None = Field(
        None,
        description="file with the weights, relative to the scenario file: .gguf, .safetensors, or a folder of a "
        "Hugging Face model with its tokenizer; default: random, drawn from the seed",
    )

    def architecture(self) -> Architecture:
        """Return the model's shape; raises `InputError` for a missing key, or for inconsistent numbers."""
        shape = {
            "layers": self.layers,
            "width": self.width,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "hidden": self.hidden,
            "vocabulary": self.vocabulary,
            "context": self.context,
            "rope_base": self.rope_base,
            "tied": self.tied,
        }
        # Each key of the scenario replaces the preset's value.
        overrides = {name: value for name, value in shape.items() if value is not None}
        if self.preset is not None:
            base = asdict(preset(self.preset))
        else:
            # Without `kv_heads`, each query head has a key and a value head of its own.
            base = {"kv_heads": overrides.get("heads"), "context": 2048}
            for name in ("layers", "width", "heads", "hidden", "vocabulary"):
                if name not in overrides:
                    raise InputError(
                        f"name a 'preset', or give '{name}'",
                        ("workload", "model", name),
                    )
        architecture = Architecture(**{**base, **overrides})
        if architecture.heads % architecture.kv_heads:
            raise InputError(
                f"{architecture.heads} heads do not divide over {architecture.kv_heads} key-value heads: give a number "
                "that divides them",
                ("workload", "model", "kv_heads"),
            )
        # Rotary positions rotate pairs of values of a head, so each head needs an even number of values.
        divisor = 2 * architecture.heads
        if not architecture.head_width and architecture.width % divisor:
            raise InputError(
                f"a width of {architecture.width} does not divide over {architecture.heads} heads of an even number of "
                f"values: give a multiple of {divisor}",
                ("workload", "model", "width"),
            )
        return architecture


class DraftPart(LanguageModelPart):
    """A small model on the coordinator, which proposes tokens that the stages verify together."""

    proposed: int = Field(
        4, ge=1, le=64, description="maximum number of tokens proposed at once"
    )


class PromptsPart(ConfigModel):
    """Prompts from the lines of a file, or of random tokens."""

    file: str | None = Field(
        None,
        description="text file with one prompt per line, relative to the scenario file",
    )
    count: int = Field(
        1, ge=1, le=100_000, description="number of prompts, without a file"
    )
    length: int = Field(
        32, ge=1, description="number of random tokens of each prompt, without a file"
    )


class ArrivalsPart(ConfigModel):
    """Times at which requests arrive at the coordinator."""

    every: Duration = Field(
        0.0, ge=0, description="interval between two requests; 0: all arrive at once"
    )
    poisson: bool = Field(
        False, description="whether intervals are random, with `every` as their mean"
    )


class SamplingPart(ConfigModel):
    """Rule by which the next token is chosen."""

    temperature: float = Field(
        0.0, ge=0, description="0: the most probable token is always chosen"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="tokens are drawn from the most probable tokens with this total probability",
    )


class GeneratePart(WorkloadPart):
    """Keys of text generation."""

    task: Literal["generate"] = Field("generate", description="kind of work")
    model: LanguageModelPart = Field(description="the language model")
    draft: DraftPart | None = Field(
        None,
        description="a small model with the same tokens, for speculative decoding by the method sequential",
    )
    prompts: tuple[str, ...] | PromptsPart = Field(
        PromptsPart(), description="texts, or the source of prompts"
    )
    tokens: int = Field(
        32, ge=1, description="maximum number of tokens to generate for each prompt"
    )
    arrivals: ArrivalsPart = Field(
        ArrivalsPart(), description="arrival times of requests"
    )
    concurrency: int = Field(
        1, ge=1, description="number of requests in flight at once"
    )
    sampling: SamplingPart = Field(
        SamplingPart(), description="rule by which tokens are chosen"
    )
    numerics: Literal["full", "none"] = Field(
        "full", description="none: only times and bytes are computed, without torch"
    )
    load_rate: ByteRate | None = Field(
        None,
        gt=0,
        description="rate at which a device reads weights from its disk; default: reading takes no time",
    )

    progress: ClassVar[str] = "request"
    unit: ClassVar[str] = "request"

    @model_validator(mode="after")
    def _check_parts(self) -> GeneratePart:
        if not isinstance(self.prompts, PromptsPart) and not self.prompts:
            raise ValueError("has no prompt: give at least one text in 'prompts'")
        if self.numerics == "none" and self.model.weights is not None:
            raise ValueError(
                "has weights and 'numerics: none', which computes nothing: leave one of them out"
            )
        if self.draft is not None and self.numerics == "none":
            raise ValueError(
                "has a draft, whose tokens are compared with computed ones: leave out 'numerics: none'"
            )
        if (
            self.draft is not None
            and self.draft.weights is not None
            and self.model.weights is None
        ):
            raise ValueError(
                "has weights for the draft only: give 'model.weights' as well"
            )
        return self

    @property
    def is_computed(self) -> bool:
        """Whether tokens are computed, and not only times."""
        return self.numerics == "full"

    @property
    def initial_weights(self) -> str | None:
        """The file or folder with the weights; None: drawn from the seed."""
        return self.model.weights

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield the keys naming files beside the scenario."""
        yield "model.weights", self.model.weights
        if self.draft is not None:
            yield "draft.weights", self.draft.weights
        if isinstance(self.prompts, PromptsPart):
            yield "prompts.file", self.prompts.file

    def title(self) -> str:
        """Return the title of the work in reports."""
        model = (
            self.model.preset
            or self.model.weights
            or f"{self.model.layers} layers of {self.model.width}"
        )
        return f"{self.method.name}: generation by {model}"


@dataclass(frozen=True)
class GenerateProblem(PlanningProblem[ProblemOptions]):
    """A planning problem of text generation."""

    workload: GeneratePart
    model: CostModel = field(kw_only=True)
    draft: CostModel | None = None
    """The draft model, which the coordinator holds."""
    requests: tuple[Request, ...] = ()
    """All requests, in the order of their arrival."""
    end_token: int | None = None
    """The token after which a text is complete; None for random prompts and vocabularies without such a token."""


@dataclass(frozen=True)
class GenerateContext(ProgramContext[ProblemOptions, DetailsType]):
    """The arguments of a device's program."""

    problem: GenerateProblem[ProblemOptions]
    weights: Mapping[str, torch.Tensor] | None = None
    """The device's weights by their names in a checkpoint; None: they are drawn from the seed."""
    on_weights: Callable[[], None] = lambda: None
    """Callback for the first use of received weights."""
    pieces: Sequence[bytes] = ()
    """The bytes of each token's text, on the coordinator."""


class Generate(Workload):
    """Generation of text by a language model: the implementation of the testbed's interface of workloads."""

    name = "generate"
    Part = GeneratePart
    arrays = "torch"
    declared = GENERATION

    def problems(
        self, scenario: Scenario, method: Method | None
    ) -> Iterator[Diagnostic]:
        """Yield errors in the model, the prompts and the files."""
        try:
            model, _, _ = self._describe_model(scenario)
            _draft_model(_part_of(scenario), scenario, model)
        except InputError as error:
            yield Diagnostic(error.key, error.text)

    def extend_problem(
        self, base_problem: PlanningProblem, scenario: Scenario, method: Method
    ) -> GenerateProblem:
        """Return the planning problem with the model and the requests; raises `InputError`."""
        model, requests, end_token = self._describe_model(scenario)
        draft = _draft_model(_part_of(scenario), scenario, model)
        return _make_problem(base_problem, model, requests, end_token, draft)

    def _describe_model(
        self, scenario: Scenario
    ) -> tuple[CostModel, tuple[Request, ...], int | None]:
        """Return costs of the model, the requests, and the token ending a text; raises `InputError`."""
        part = _part_of(scenario)
        weights = _optional_path(scenario, part.model.weights)
        architecture = _read_architecture(part.model, weights)
        if architecture.experts and part.is_computed:
            raise InputError(
                f"{part.model.preset} is a mixture of experts, which is supported for times only: add numerics: none",
                ("workload", "numerics"),
            )
        prompts, end_token = _read_prompts(part, scenario, architecture, weights)
        times = arrival_times(
            len(prompts),
            part.arrivals.every,
            poisson=part.arrivals.poisson,
            seed=scenario.seed,
        )
        requests = []
        for number, (prompt, time) in enumerate(zip(prompts, times, strict=True)):
            requests.append(Request(number, tuple(prompt), time, part.tokens))
        max_length = max(len(prompt) for prompt in prompts) + part.tokens
        if max_length > architecture.context:
            raise InputError(
                f"a prompt and its {part.tokens} tokens are {max_length} tokens, the model's context is "
                f"{architecture.context}: generate fewer, or shorten the prompt",
                ("workload", "tokens"),
            )
        storage, concurrency = part.model.storage, part.concurrency
        # Every KV cache has room for the longest sequence, since memory is reserved before the texts are known.
        model = CostModel(
            architecture, storage, tokens=max_length, sequences=concurrency
        )
        return model, tuple(requests), end_token

    def facts(self, problem: PlanningProblem) -> Mapping[str, Any]:
        """Return the model and the requests as plain values, which are sent to the devices as JSON."""
        problem = _as_generate_problem(problem)
        return {
            "model": asdict(problem.model),
            "draft": None if problem.draft is None else asdict(problem.draft),
            "requests": [asdict(request) for request in problem.requests],
            "end": problem.end_token,
        }

    def rebuild_problem(
        self, base_problem: PlanningProblem, method: Method, facts: Mapping[str, Any]
    ) -> GenerateProblem:
        """Return the problem on a device, from the result of `facts`."""

        def model_of(values: Mapping[str, Any]) -> CostModel:
            architecture = Architecture(**values["architecture"])
            return CostModel(**{**values, "architecture": architecture})

        model = model_of(facts["model"])
        draft = None if facts["draft"] is None else model_of(facts["draft"])
        requests = []
        for values in facts["requests"]:
            # JSON has lists instead of tuples.
            prompt = tuple(values["prompt"])
            requests.append(Request(**{**values, "prompt": prompt}))
        return _make_problem(base_problem, model, tuple(requests), facts["end"], draft)

    def load(self, prepared: Prepared) -> Loaded:
        """Read the text of all tokens, and all weights if the scenario names a file."""
        part = _part_of(prepared.scenario)
        problem = _as_generate_problem(prepared.problem)
        if part.model.weights is None:
            return Loaded(_open_tokenizer(None).pieces, None)
        from testbed_generation.weights import DRAFT, open_weights, read_weights

        path = _file_path(prepared.scenario, part.model.weights)
        # Prompts of random tokens need no tokenizer, and a safetensors file may be without one.
        is_random = isinstance(part.prompts, PromptsPart) and part.prompts.file is None
        tokenizer = _open_tokenizer(None if is_random else path)
        weights = read_weights(open_weights(path), problem.model.architecture)
        draft_path = None
        if part.draft is not None:
            draft_path = _optional_path(prepared.scenario, part.draft.weights)
        if draft_path is not None and problem.draft is not None:
            draft = open_weights(draft_path)
            for name, weight in read_weights(draft, problem.draft.architecture).items():
                weights[f"{DRAFT}{name}"] = weight
        return Loaded(tokenizer.pieces, weights)

    def inputs(
        self, prepared: Prepared, data: Any, weights: Mapping[str, Any] | None
    ) -> Inputs:
        """Return the weights of each device: on the coordinator all, elsewhere only the assigned weights."""
        return GenerateInputs(prepared, data)

    def read_data(self, body: bytearray) -> Sequence[bytes]:
        """Return the text of each token."""
        return [piece.encode("latin-1") for piece in json.loads(body)]

    def prepare_device(self, problem: PlanningProblem) -> dict[str, Any] | None:
        """Import the modules of all programs; return the processor and the kernels if tokens are computed."""
        problem = _as_generate_problem(problem)
        # These imports, mainly that of torch, take seconds. During the run, the coordinator would count an importing
        # device as lost.
        for module in PROGRAM_MODULES:
            import_module(f"testbed_generation.{module}")
        if not problem.workload.is_computed:
            return None
        from testbed.ml import kernels

        return kernels.computing()

    def program_context(
        self,
        device: str,
        problem: PlanningProblem,
        plan: Plan,
        data: Any,
        weights: Mapping[str, Any] | None,
        on_weights: Callable[[], None],
    ) -> GenerateContext:
        """Return the context with the weights of the device."""
        problem = _as_generate_problem(problem)
        return GenerateContext(
            problem, plan, weights=weights, on_weights=on_weights, pieces=data or ()
        )

    def library_versions(self) -> dict[str, Any] | None:
        """Return the processor and the kernels that texts depend on; None without torch."""
        from testbed.ml import kernels

        return kernels.computing()

    def simulation_context(
        self, problem: PlanningProblem
    ) -> AbstractContextManager[None]:
        """Restrict torch to one thread during a simulation."""
        problem = _as_generate_problem(problem)
        if not problem.workload.is_computed:
            return super().simulation_context(problem)
        from testbed.ml import kernels

        return kernels.one_thread()


@dataclass(frozen=True)
class Loaded:
    """The contents of the files named by a scenario."""

    pieces: Sequence[bytes]
    """The bytes of each token's text."""
    weights: Mapping[str, torch.Tensor] | None
    """All weights of the model; None: devices draw them from the seed."""


class GenerateInputs(Inputs):
    """The weights of each device, and the text of tokens for the coordinator."""

    def __init__(self, prepared: Prepared, loaded: Loaded) -> None:
        self.begins_with_weights = loaded.weights is not None
        self._plan = prepared.plan
        self._weights = loaded.weights
        self._pieces = loaded.pieces
        problem = _as_generate_problem(prepared.problem)
        self._architecture = problem.model.architecture

    def _weights_of(self, device: str) -> Mapping[str, torch.Tensor] | None:
        # After a loss the coordinator sends other devices the weights of their new layers, so it needs all weights.
        if self._weights is None or device == self._plan.coordinator:
            return self._weights
        from testbed_generation.weights import assignment_weight_names

        assignments = self._plan.assignments_of(device)
        names = assignment_weight_names(self._architecture, assignments)
        return {name: self._weights[name] for name in names}

    def program_context(
        self,
        device: str,
        problem: PlanningProblem,
        plan: Plan,
        on_weights: Callable[[], None],
        shared: Any = None,
    ) -> GenerateContext:
        """Return the context of a device in the process of a simulation."""
        problem = _as_generate_problem(problem)
        pieces = self._pieces if device == self._plan.coordinator else ()
        return GenerateContext(
            problem, plan, shared, self._weights_of(device), on_weights, pieces
        )

    def data(self, device: str) -> bytes | None:
        """Return the text of each token, for the coordinator in a container."""
        if device != self._plan.coordinator:
            return None
        # JSON has no bytes: latin-1 encodes each byte as one letter.
        return json.dumps([piece.decode("latin-1") for piece in self._pieces]).encode()

    def weights(self, device: str) -> bytes | None:
        """Return the weights for a device in a container, as a safetensors file."""
        weights = self._weights_of(device)
        if weights is None:
            return None
        import safetensors.torch

        return bytes(safetensors.torch.save(dict(weights)))


def _as_generate_problem(problem: PlanningProblem) -> GenerateProblem:
    # The testbed passes problems that this workload has made, by the type of their base class.
    assert isinstance(problem, GenerateProblem)
    return problem


def _part_of(scenario: Scenario) -> GeneratePart:
    # The testbed calls this workload only for scenarios with its part.
    assert isinstance(scenario.workload, GeneratePart)
    return scenario.workload


def _file_path(scenario: Scenario, name: str) -> Path:
    # Paths in a scenario are relative to its file.
    return scenario.source.folder / name


def _optional_path(scenario: Scenario, name: str | None) -> Path | None:
    return None if name is None else _file_path(scenario, name)


def _make_problem(
    base: PlanningProblem,
    model: CostModel,
    requests: tuple[Request, ...],
    end_token: int | None,
    draft: CostModel | None,
) -> GenerateProblem:
    """Return the planning problem of the testbed with the model and the requests."""
    # The testbed calls this workload only for scenarios with its part.
    assert isinstance(base.workload, GeneratePart)
    return GenerateProblem(
        base.devices,
        base.links,
        base.workload,
        base.options,
        base.seed,
        model=model,
        draft=draft,
        requests=requests,
        end_token=end_token,
    )


def _read_architecture(part: LanguageModelPart, weights: Path | None) -> Architecture:
    """Return the shape by the keys of the scenario or by a GGUF file.

    Raises `InputError` if a file has weights of another shape than the keys of the scenario.
    """
    if weights is None:
        return part.architecture()
    from testbed_generation.weights import GgufFile, check_shapes, open_weights

    file = open_weights(weights)
    # A GGUF file describes its model; a safetensors file has weights only.
    if isinstance(file, GgufFile) and part.preset is None and part.layers is None:
        return file.architecture
    architecture = part.architecture()
    check_shapes(file, architecture)
    return architecture


def _draft_model(
    part: GeneratePart, scenario: Scenario, model: CostModel
) -> CostModel | None:
    """Return the draft model; raises `InputError` if it has another vocabulary or too short a context."""
    if part.draft is None:
        return None
    weights = _optional_path(scenario, part.draft.weights)
    architecture = _read_architecture(part.draft, weights)
    # Proposed tokens are compared with the model's tokens by their numbers.
    if architecture.vocabulary != model.architecture.vocabulary:
        raise InputError(
            f"the draft has a vocabulary of {architecture.vocabulary} tokens, the model of "
            f"{model.architecture.vocabulary}: choose a draft of the same family",
            ("workload", "draft", "vocabulary"),
        )
    if architecture.context < model.cache_length:
        raise InputError(
            f"the draft has a context of {architecture.context} tokens, the longest sequence {model.cache_length}: "
            "choose a draft with a longer context, or generate fewer tokens",
            ("workload", "draft", "context"),
        )
    return CostModel(
        architecture, part.draft.storage, model.cache_length, model.sequences
    )


def _read_prompts(
    part: GeneratePart,
    scenario: Scenario,
    architecture: Architecture,
    weights: Path | None,
) -> tuple[Sequence[Sequence[int]], int | None]:
    """Return the tokens of all prompts, and the token ending a text."""
    prompts = part.prompts
    if isinstance(prompts, PromptsPart) and prompts.file is None:
        random_prompts = []
        for number in range(prompts.count):
            drawn = random_prompt(
                prompts.length, architecture.vocabulary, scenario.seed, number
            )
            random_prompts.append(drawn)
        return random_prompts, None
    texts: Sequence[str]
    if isinstance(prompts, PromptsPart):
        # Prompts without a file were returned above.
        assert prompts.file is not None
        texts = _read_lines(_file_path(scenario, prompts.file))
    else:
        texts = prompts
    tokenizer = _open_tokenizer(weights)
    encoded = [tokenizer.encode(text) for text in texts]
    for number, prompt in enumerate(encoded, start=1):
        if not prompt:
            raise InputError(
                f"prompt {number} is empty: give a text of at least one token",
                ("workload", "prompts"),
            )
    if not encoded:
        raise InputError(
            "the file has no prompt: write one on each line",
            ("workload", "prompts", "file"),
        )
    return encoded, tokenizer.end_token


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file of prompts without empty ones; raises `InputError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror or error}: name a text file with a prompt on each line",
            ("workload", "prompts", "file"),
        ) from None
    return [line for line in text.splitlines() if line.strip()]


def _open_tokenizer(weights: Path | None) -> Tokenizer:
    """Return the tokenizer of a file of weights, or single bytes without a file; raises `InputError`."""
    # Imported here, since the module imports torch.
    from testbed_generation.tokens import open_tokenizer

    return open_tokenizer(weights)

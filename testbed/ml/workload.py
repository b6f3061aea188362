"""The keys of training and inference in a scenario: model, data, training, and duration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from testbed.common.part import ConfigModel
from testbed.ml.training.schema import TrainingPart
from testbed.work import MOST_STEPS, WorkloadPart

MOST_SAMPLES = 2_000_000
"""Maximum samples of a data set, and of a batch."""
Initialisation = Literal["lecun", "he", "glorot", "torch"]
"""Distribution of initial weights, see `testbed.ml.models.layers`."""


class ModelPart(ConfigModel):
    """A neural network by name, with its options (see `testbed show models`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(
        description="one of `testbed show models`, or a function of `file`; further keys are its options, or its "
        "arguments"
    )
    file: str | None = Field(
        None,
        description="Python file with a function that returns a torch.nn.Module, relative to the scenario file; it is "
        "sent to the devices",
    )
    units: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="with `file`: the modules, such as layer1.0, that begin a unit; default: where little crosses",
    )
    weights: str | None = Field(
        None,
        description="file to read them from, relative to the scenario file: a state_dict as safetensors or "
        "of torch.save, Darknet's for yolov2, or a scenario, which is simulated first; default: random, drawn from "
        "the seed",
    )

    @property
    def title(self) -> str:
        """The name shown for a run."""
        return self.name if self.file is None else f"{self.file}:{self.name}"

    def options(self) -> dict[str, Any]:
        """Return the keys validated by the model's own options."""
        return dict(self.model_extra or {})


class SplitPart(ConfigModel):
    """The distribution of training samples among the devices with data."""

    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="number of samples of each device with data, in device order, drawn at random",
    )
    dirichlet: float | None = Field(
        None,
        gt=0,
        description="each class is shared in proportions drawn from a Dirichlet distribution of this concentration: "
        "0.1 gives a device few classes, 100 nearly its share of each",
    )
    shards: int | None = Field(
        None,
        ge=1,
        description="classes a device: each has samples of as many classes, and devices share a class",
    )

    quantity: float | None = Field(
        None,
        gt=0,
        description="how many samples a device has, of all classes alike, is drawn from a Dirichlet distribution of "
        "this concentration: 0.5 gives some devices few, 100 nearly as many to each",
    )
    noise: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="feature shift: all alike, but the samples of device i of N have Gaussian noise of this variance "
        "times i/N",
    )
    column: str | None = Field(
        None,
        description="of a table: samples with one value in this column, such as a user or a place, stay together; "
        "values go to devices so that these have about as many samples",
    )

    min_samples: int | None = Field(
        None,
        ge=1,
        description="with dirichlet or quantity: samples that each device has at least; shares are drawn again, up to "
        "1,000 times, until all have as many",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = ("sizes", "dirichlet", "shards", "quantity", "noise", "column")
        if sum(getattr(self, key) is not None for key in ways) != 1:
            raise ValueError(
                f"takes exactly one of {', '.join(map(repr, ways[:-1]))} and '{ways[-1]}'"
            )
        if (
            self.min_samples is not None
            and self.dirichlet is None
            and self.quantity is None
        ):
            raise ValueError(
                "'min_samples' requires 'dirichlet' or 'quantity', whose shares are random"
            )
        return self


Split = Annotated[
    Annotated[Literal["lead", "iid"], Tag("[name]")]
    | Annotated[SplitPart, Tag("[keys]")],
    # Which of the two is meant shows, so that an error is about that one alone.
    Discriminator(
        lambda value: "[keys]" if isinstance(value, dict | SplitPart) else "[name]"
    ),
]


_SIZE = r"^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$"


class AugmentPart(ConfigModel):
    """Random augmentation of training samples, drawn anew in each epoch."""

    transforms: tuple[dict[str, Any], ...] = Field(
        min_length=1,
        description="transforms of torchvision.transforms by name with their options, one after the other, such as "
        "{name: RandomCrop, size: 32, padding: 4}; they need the extra `vision`",
    )
    copies: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="how often each sample is drawn at most, if not anew in each epoch: after so "
        "many epochs come the same again",
    )


class DataPart(ConfigModel):
    """A data set by name (see `testbed show data`), or the user's own, by `file` or `path`."""

    name: str = Field(
        "digits",
        description="one of `testbed show data`, or a function of `file`; default with `path`: the file name",
    )
    file: str | None = Field(
        None,
        description="Python file with a function that returns (train, test), each a pair of samples and labels as "
        "arrays or tensors, or a torch data set; relative to the scenario file",
    )
    folder: str | None = Field(
        None,
        description="folder of its files, relative to the scenario file; default: data/<name> in the working directory",
    )
    path: str | None = Field(
        None,
        description="your own samples, relative to the scenario file: arrays as .npz or .safetensors, a table as .csv "
        "or .parquet, or a folder with one of images for each class; for `image`: the picture's file",
    )
    label: str | None = Field(
        None,
        description="of a table: the column of the labels, classes or numbers to learn",
    )
    columns: tuple[str, ...] | dict[str, tuple[str, ...]] | None = Field(
        None,
        min_length=1,
        description="of a table: the columns of a sample, or of each of its inputs by their names in `forward`; "
        "default: all but those of label and split",
    )
    size: str | None = Field(
        None,
        json_schema_extra={"pattern": _SIZE},
        description="for a folder of images: HEIGHTxWIDTH, into which all are fitted; default: their common size",
    )
    train: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="use only the first N training samples"
    )
    augment: AugmentPart | None = Field(
        None, description="of pictures: changes at random, by the seed"
    )
    shuffle: bool = Field(
        True,
        description="whether training samples come in another order in each epoch, by the seed; else in their own",
    )
    split: Split = Field(
        "lead",
        description="who owns training samples. lead: the lead all of them; iid: each device as many, drawn at random; "
        "keys: as they say",
    )
    test: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="use only the first N test samples"
    )

    @property
    def title(self) -> str:
        """The name shown for a run."""
        return self.name if self.file is None else f"{self.file}:{self.name}"

    @field_validator("size")
    @classmethod
    def _height_and_width(cls, size: str | None) -> str | None:
        if size is not None and not re.match(_SIZE, size):
            raise ValueError(f"'{size}' is not HEIGHTxWIDTH, such as 32x32")
        return size

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_path(cls, value: Any) -> Any:
        if (
            isinstance(value, dict)
            and isinstance(value.get("path"), str)
            and "name" not in value
        ):
            path = PurePath(value["path"])
            # Unlike any name of the list: those have neither a suffix nor a stroke.
            return {**value, "name": path.name if path.suffix else f"{path.name}/"}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file is not None and self.path is not None:
            raise ValueError("takes one of 'file' and 'path'")
        if self.file is not None and "name" not in self.model_fields_set:
            raise ValueError(
                "needs 'name', the function of 'file' that returns the data"
            )
        return self


class LearningPart(WorkloadPart):
    """Keys of training and inference."""

    task: Literal["train", "infer"] = Field("train", description="kind of work")
    model: ModelPart = Field(description="the neural network")
    initialisation: Initialisation | None = Field(
        None,
        description="how the first weights of a network of `testbed show models` are drawn, uniformly, for layers of f "
        "inputs and g outputs: lecun within sqrt(3/f) of zero, he sqrt(6/f), glorot sqrt(6/(f+g)), torch sqrt(1/f), "
        "biases too, which are zero otherwise; default: lecun",
    )
    data: DataPart = Field(
        default_factory=lambda: DataPart(),
        description="data set for training or inference",
    )
    training: TrainingPart = Field(
        default_factory=lambda: TrainingPart(), description="how the model is trained"
    )
    numerics: Literal["full", "stacked", "none"] = Field(
        "full",
        description="none: timing only. The same messages, sizes and faults, but no tensor is computed: there are no "
        "weights, no loss and no accuracy; stacked: in a simulation, devices that train alike are computed together, "
        "which is quicker for small networks and equal but for rounding (on containers it is full)",
    )
    reproducible: bool = Field(
        False,
        description="compute with the kernels that every processor has, so that losses and weights do not depend on "
        "the instruction set; slower",
    )
    batch_size: int = Field(
        32,
        ge=1,
        le=MOST_SAMPLES,
        description="samples of a training step or of a request",
    )
    drop_last: bool = Field(
        True,
        description="training: samples that make no whole batch sit out an epoch, another order of the next one brings "
        "them back; false: they make a smaller last batch",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="training: how often every sample is seen",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="training: number of steps, instead of epochs",
    )
    requests: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="inference: number of batches of test samples sent through, round and round; none: one pass",
    )

    @model_validator(mode="before")
    @classmethod
    def _moved_optimizer(cls, value: Any) -> Any:
        if isinstance(value, dict) and "optimizer" in value:
            raise ValueError(
                "'optimizer' is a key of 'training' now: write training: {optimizer: {...}}"
            )
        if (
            isinstance(value, dict) and value.get("programs") == {}
        ):  # results of version 1.0 have it
            value = {key: each for key, each in value.items() if key != "programs"}
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.initialisation is not None and self.model.weights is not None:
            raise ValueError(
                "weights read from a file exclude 'initialisation': remove one of the two"
            )
        given = [
            key
            for key in ("epochs", "steps", "requests")
            if getattr(self, key) is not None
        ]
        if self.task == "infer" and given not in ([], ["requests"]):
            raise ValueError(
                "the length of an inference workload is given by 'requests'"
            )
        if self.task == "train" and (len(given) != 1 or given == ["requests"]):
            raise ValueError(
                "a training workload needs exactly one of 'epochs' and 'steps'"
            )
        return self

    @property
    def progress(self) -> str:  # type: ignore[override]  # of two tasks with the same keys
        """The event counting progress of the run."""
        return "step" if self.task == "train" else "request"

    @property
    def unit(self) -> str:  # type: ignore[override]
        """The user-visible name of a progress unit."""
        return self.progress

    def on_containers(self) -> Self:
        """Return the keys without stacked numerics: a container computes for one device only."""
        return (
            self.model_copy(update={"numerics": "full"})
            if self.numerics == "stacked"
            else self
        )

    @property
    def is_computed(self) -> bool:
        """Whether values are computed, in contrast to timing-only runs."""
        return self.numerics != "none"

    @property
    def is_reproducible(self) -> bool:
        """Whether the workload asks for processor-independent kernels."""
        return self.reproducible

    @property
    def initial_weights(self) -> str | None:
        """The file of the initial weights."""
        return self.model.weights

    @property
    def total(self) -> int | None:
        """The number of steps or requests the scenario asks for."""
        return self.steps if self.task == "train" else self.requests

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield the keys naming data and weights beside the scenario."""
        yield from (("data.folder", self.data.folder), ("data.path", self.data.path))
        yield "model.weights", self.model.weights

    def sources(self) -> Mapping[str, Any]:
        """Return method, model and data."""
        return {"method": self.method, "model": self.model, "data": self.data}

    def files(self) -> Iterator[str]:
        """Yield the Python files named by the training."""
        yield from (
            part.file for _, part in self.training.parts() if part.file is not None
        )

    def title(self) -> str:
        """Return the name of the work in reports."""
        return f"{self._progress_verb} of {self.model.title} on {self.data.title}"

    def labels(self) -> Iterator[str]:
        """Yield the facts in a report's header."""
        yield self._progress_verb
        yield f"{self.model.title} on {self.data.title}"

    @property
    def _progress_verb(self) -> str:
        return (
            f"{self.method.name} {'training' if self.task == 'train' else 'inference'}"
        )

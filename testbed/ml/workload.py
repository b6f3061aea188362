"""The keys of training and inference in a scenario: model, data, training, and length of the run.

Each class is a section of the scenario. Descriptions of keys appear in docs/scenario/keys.md and in `testbed show`.
"""

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
"""Maximum number of samples used from a data set, and of samples in a batch."""
Initialisation = Literal["lecun", "he", "glorot", "torch"]
"""Distribution of initial weights; `LearningPart.initialisation` describes the values."""


class ModelPart(ConfigModel):
    """A neural network by name, with its options (see `testbed show models`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(
        description=(
            "a model of `testbed show models`, or a function of `file`; further "
            "keys are its options or arguments"
        )
    )
    file: str | None = Field(
        None,
        description=(
            "Python file with a function that returns a torch.nn.Module, relative "
            "to the scenario file; the file is sent to the devices"
        ),
    )
    units: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description=(
            "with `file`: modules that begin a unit, such as layer1.0; default: "
            "units begin where few tensors cross"
        ),
    )
    weights: str | None = Field(
        None,
        description=(
            "file with initial weights, relative to the scenario file: a state_dict "
            "as safetensors or by torch.save, a Darknet file for yolov2, or a "
            "scenario, which is simulated first and whose final weights are used; "
            "default: weights drawn from the seed"
        ),
    )

    @property
    def title(self) -> str:
        """The name of the model in reports."""
        return self.name if self.file is None else f"{self.file}:{self.name}"

    def options(self) -> dict[str, Any]:
        """Return all keys beyond the fields of this class; the model validates them."""
        return dict(self.model_extra or {})


class SplitPart(ConfigModel):
    """The distribution of training samples among the devices with data.

    Exactly one key determines the distribution.

    >>> SplitPart(dirichlet=0.5, min_samples=20).min_samples
    20
    """

    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="number of samples of each device with data, in device order, drawn at random",
    )
    dirichlet: float | None = Field(
        None,
        gt=0,
        description=(
            "concentration of a Dirichlet distribution, from which the proportions "
            "of each class are drawn: with 0.1 a device has few classes, with 100 "
            "nearly equal shares"
        ),
    )
    shards: int | None = Field(
        None,
        ge=1,
        description=(
            "number of classes of each device; devices with a common class share "
            "its samples"
        ),
    )

    quantity: float | None = Field(
        None,
        gt=0,
        description=(
            "concentration of a Dirichlet distribution, from which the numbers of "
            "samples of the devices are drawn, where all devices have the same mix of "
            "classes: with 0.5 some devices have few samples, with 100 nearly equal "
            "numbers"
        ),
    )
    noise: float | None = Field(
        None,
        gt=0,
        le=1000,
        description=(
            "feature shift: equal shares, where samples of device i of N have "
            "Gaussian noise with this variance times i/N"
        ),
    )
    column: str | None = Field(
        None,
        description=(
            "column of a table: samples with equal values, such as users or places, "
            "stay together; devices have about equal numbers of samples"
        ),
    )

    min_samples: int | None = Field(
        None,
        ge=1,
        description=(
            "with dirichlet or quantity: minimum number of samples of each device; "
            "shares are drawn up to 1,000 times until all devices have this number"
        ),
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kinds = ("sizes", "dirichlet", "shards", "quantity", "noise", "column")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            *first, last = kinds
            names = ", ".join(map(repr, first))
            raise ValueError(f"takes exactly one of {names} and '{last}'")
        [kind] = given
        # Only these two kinds have random sizes, which another draw changes.
        if self.min_samples is not None and kind not in ("dirichlet", "quantity"):
            raise ValueError(
                "'min_samples' requires 'dirichlet' or 'quantity', whose shares are random"
            )
        return self


def _split_tag(value: Any) -> str:
    """Return the form of a `split`, keys or a name, so that pydantic reports the errors of this form alone."""
    return "[keys]" if isinstance(value, dict | SplitPart) else "[name]"


Split = Annotated[
    Annotated[Literal["coordinator", "iid"], Tag("[name]")]
    | Annotated[SplitPart, Tag("[keys]")],
    Discriminator(_split_tag),
]
"""The value of `data.split`: a name or keys."""

_SIZE = r"^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$"
"""Regular expression of HEIGHTxWIDTH, the size of images, each from 1 to 9,999 pixels."""


class AugmentPart(ConfigModel):
    """Random augmentation of training samples, drawn anew in each epoch."""

    transforms: tuple[dict[str, Any], ...] = Field(
        min_length=1,
        description=(
            "successive transforms of torchvision.transforms with their options, "
            "such as {name: RandomCrop, size: 32, padding: 4}; requires the extra "
            "`vision`"
        ),
    )
    copies: int | None = Field(
        None,
        ge=1,
        le=1000,
        description=(
            "number of augmented versions of each sample, which repeat after this "
            "number of epochs; default: new versions in each epoch"
        ),
    )


class DataPart(ConfigModel):
    """A data set by name (see `testbed show data`), or the user's own, by `file` or `path`.

    >>> DataPart(name="digits", train=100).split
    'coordinator'
    """

    name: str = Field(
        "digits",
        description=(
            "a data set of `testbed show data`, or a function of `file`; default "
            "with `path`: the file name"
        ),
    )
    file: str | None = Field(
        None,
        description="Python file with a function that returns (train, test), each a pair of samples and labels as "
        "arrays or tensors, or a torch data set; relative to the scenario file",
    )
    folder: str | None = Field(
        None,
        description=(
            "folder of the data set, relative to the scenario file; default: "
            "data/<name> in the working directory"
        ),
    )
    path: str | None = Field(
        None,
        description=(
            "your own samples, relative to the scenario file: arrays as .npz or "
            ".safetensors, a table as .csv or .parquet, or a folder with a folder "
            "of images for each class; with `name: image`, the file of the picture"
        ),
    )
    label: str | None = Field(
        None,
        description="column of a table with the labels, which are classes or numbers",
    )
    columns: tuple[str, ...] | dict[str, tuple[str, ...]] | None = Field(
        None,
        min_length=1,
        description=(
            "columns of a table that form a sample, or columns of each input of "
            "`forward` by name; default: all columns except label and split"
        ),
    )
    size: str | None = Field(
        None,
        json_schema_extra={"pattern": _SIZE},
        description=(
            "size of the images of a folder as HEIGHTxWIDTH, to which all are "
            "resized; default: their common size"
        ),
    )
    train: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="use only the first N training samples"
    )
    augment: AugmentPart | None = Field(
        None, description="random changes of images, drawn from the seed"
    )
    shuffle: bool = Field(
        True,
        description=(
            "whether each epoch has a new order of training samples, drawn from the "
            "seed"
        ),
    )
    split: Split = Field(
        "coordinator",
        description=(
            "owners of training samples. coordinator: the coordinator owns all; iid: "
            "devices own equal numbers, drawn at random; or keys such as "
            "{dirichlet: 0.5}"
        ),
    )
    test: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="use only the first N test samples"
    )

    @property
    def title(self) -> str:
        """The name of the data set in reports."""
        return self.name if self.file is None else f"{self.file}:{self.name}"

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: str | None) -> str | None:
        # The error of a pydantic pattern would show the regular expression instead of an example.
        if size is not None and not re.match(_SIZE, size):
            raise ValueError(f"'{size}' is not HEIGHTxWIDTH, such as 32x32")
        return size

    @model_validator(mode="before")
    @classmethod
    def _name_by_path(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "name" in value:
            return value
        if not isinstance(value.get("path"), str):
            return value
        path = PurePath(value["path"])
        # A suffix or a trailing slash distinguishes this name from a name of `testbed show data`.
        name = path.name if path.suffix else f"{path.name}/"
        return {**value, "name": name}

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.file is not None and self.path is not None:
            raise ValueError("cannot have both 'file' and 'path': remove one of them")
        if self.file is not None and "name" not in self.model_fields_set:
            raise ValueError(
                "needs 'name', the function of 'file' that returns the data"
            )
        return self


class LearningPart(WorkloadPart):
    """Keys of training and inference."""

    task: Literal["train", "infer"] = Field("train", description="kind of workload")
    model: ModelPart = Field(description="the neural network")
    initialisation: Initialisation | None = Field(
        None,
        description=(
            "uniform distribution of the initial weights of models of `testbed show "
            "models`, for layers with f inputs and g outputs: lecun within "
            "sqrt(3/f) of zero, he sqrt(6/f), glorot sqrt(6/(f+g)), torch sqrt(1/f) "
            "with biases, which are zero otherwise; default: lecun"
        ),
    )
    data: DataPart = Field(
        default_factory=lambda: DataPart(),
        description="data set for training or inference",
    )
    training: TrainingPart = Field(
        default_factory=lambda: TrainingPart(), description="training configuration"
    )
    numerics: Literal["full", "stacked", "none"] = Field(
        "full",
        description=(
            "none: timing only, with the same messages, sizes and faults, and "
            "without tensors, weights, loss and accuracy; stacked: a simulation "
            "computes devices with equal work together, which is faster for small "
            "networks, with results equal up to rounding; in containers the same as full"
        ),
    )
    reproducible: bool = Field(
        False,
        description=(
            "use kernels that all processors have, so that losses and weights do "
            "not depend on the instruction set; slower"
        ),
    )
    batch_size: int = Field(
        32,
        ge=1,
        le=MOST_SAMPLES,
        description="samples of a training step or of a request",
    )
    drop_last: bool = Field(
        True,
        description=(
            "training: leave out the last samples of an epoch if they do not fill a "
            "batch; with `shuffle`, these differ between epochs; false: a smaller last "
            "batch"
        ),
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="training: number of passes over all samples",
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
        description=(
            "inference: number of requests, each a batch of test samples, repeated "
            "if necessary; default: one pass"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _convert_former_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "optimizer" in value:
            raise ValueError(
                "'optimizer' is a key of 'training' now: write training: {optimizer: {...}}"
            )
        if value.get("programs") == {}:
            # Results of version 1.0 have this key.
            value = dict(value)
            del value["programs"]
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.initialisation is not None and self.model.weights is not None:
            raise ValueError(
                "weights read from a file exclude 'initialisation': remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        lengths = ("epochs", "steps", "requests")
        given = [key for key in lengths if getattr(self, key) is not None]
        # An inference without a length is one pass over the test samples.
        if self.task == "infer" and set(given) - {"requests"}:
            raise ValueError(
                "the length of an inference workload is given by 'requests'"
            )
        if self.task == "train" and given not in (["epochs"], ["steps"]):
            raise ValueError(
                "a training workload needs exactly one of 'epochs' and 'steps'"
            )
        return self

    @property
    def progress(self) -> str:  # type: ignore[override]  # one class for two tasks
        """The type of the event counting the progress of a run."""
        return "step" if self.task == "train" else "request"

    @property
    def unit(self) -> str:  # type: ignore[override]
        """The name of a unit of progress in reports."""
        return self.progress

    def on_containers(self) -> Self:
        """Return the keys with full instead of stacked numerics: a container computes for one device only."""
        if self.numerics != "stacked":
            return self
        return self.model_copy(update={"numerics": "full"})

    @property
    def is_computed(self) -> bool:
        """Whether values are computed, in contrast to timing-only runs."""
        return self.numerics != "none"

    @property
    def is_reproducible(self) -> bool:
        """Whether the workload uses kernels available on all processors."""
        return self.reproducible

    @property
    def initial_weights(self) -> str | None:
        """The file of the initial weights."""
        return self.model.weights

    @property
    def total(self) -> int | None:
        """The number of steps or requests; None if the scenario does not state the number."""
        return self.steps if self.task == "train" else self.requests

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield the keys with paths of data and weights, relative to the scenario file, and their values."""
        yield "data.folder", self.data.folder
        yield "data.path", self.data.path
        yield "model.weights", self.model.weights

    def sources(self) -> Mapping[str, Any]:
        """Return the sections that may name a Python file, by key."""
        return {"method": self.method, "model": self.model, "data": self.data}

    def files(self) -> Iterator[str]:
        """Yield the Python files named by the training."""
        for _, part in self.training.parts():
            if part.file is not None:
                yield part.file

    def title(self) -> str:
        """Return the name of the work in reports."""
        return f"{self._activity} of {self.model.title} on {self.data.title}"

    def labels(self) -> Iterator[str]:
        """Yield the facts in a report's header."""
        yield self._activity
        yield f"{self.model.title} on {self.data.title}"

    @property
    def _activity(self) -> str:
        kind = "training" if self.task == "train" else "inference"
        return f"{self.method.name} {kind}"

"""Augmentation of training images by torchvision transforms, drawn anew in each epoch; devices need no torchvision."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from testbed.common.errors import InputError, Key
from testbed.common.lazy import np, npt, require_extra
from testbed.common.seeds import derive
from testbed.ml.data.batches import Indices, steps_per_epoch
from testbed.ml.lazy import torch
from testbed.ml.workload import LearningPart

_KEY: Key = ("data", "augment", "transforms")


@dataclass(frozen=True)
class Drawing:
    """Draws augmented samples as a function of seed, epoch and sample index, independent of owner and time."""

    chain: Any
    """A transform of torchvision: from a picture, (channels, height, width), to a picture of the same shape."""
    seed: int
    workload: LearningPart
    """The workload, which gives the number of epochs."""
    places: Indices
    """(samples,): indices of the drawn samples among all training samples."""

    @property
    def copies(self) -> int:
        """Number of distinct epochs; later epochs repeat these."""
        workload = self.workload
        part = workload.data.augment
        if part is not None and part.copies is not None:
            return part.copies
        if workload.steps is None:
            return workload.epochs or 1
        per_epoch = steps_per_epoch(
            len(self.places), workload.batch_size, drop_last=workload.drop_last
        )
        return math.ceil(workload.steps / per_epoch)

    def part(self, indices: Indices) -> Drawing:
        """Return the augmentation of some samples, (indices,)."""
        return replace(self, places=self.places[indices])

    def __call__(
        self,
        images: npt.NDArray[Any],
        indices: Indices,
        epoch: int,
    ) -> npt.NDArray[np.float32]:
        """Return the augmented images of an epoch, (samples, channels, height, width).

        Args:
            images: the images without augmentation, of the same shape.
            indices: (samples,): the place of each image among the samples of `places`.
            epoch: number of the epoch, from 0.

        Raises `InputError` for a transform that does not accept the images or changes their shape.
        """
        augmented = np.empty(images.shape, np.float32)
        # Transforms draw from the global generators of torch and of Python: both are restored.
        state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            for number, index in enumerate(indices):
                place = int(self.places[index])
                copy = epoch % self.copies
                seed = derive(self.seed, "augment", copy, place)
                # The generator of this processor alone, as in `testbed.ml.layers.shard`.
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                try:
                    augmented[number] = self.chain(torch.tensor(images[number]))
                except (TypeError, ValueError, RuntimeError) as error:
                    shape = images.shape[1:]
                    text = f"pictures of {shape} do not support this transform, or change their shape: {error}"
                    raise InputError(text, _KEY) from None
        random.setstate(state)
        return augmented


def drawing(
    workload: LearningPart,
    seed: int,
    shape: tuple[int, ...],
    samples: int,
) -> Drawing:
    """Return the augmentation a workload configures for a number of training samples of one shape.

    Raises `InputError` for samples other than images, unknown transforms, and transforms changing the shape.
    """
    assert workload.data.augment is not None
    if len(shape) != 3:
        raise InputError(
            f"requires images, but the samples have shape {shape}: remove the key",
            _KEY[:-1],
        )
    known = require_extra("torchvision.transforms", "vision", "augmentation", _KEY)
    steps = []
    try:
        for transform in workload.data.augment.transforms:
            options = dict(transform)
            name = options.pop("name")
            definition = getattr(known, name)
            steps.append(definition(**options))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"unknown torchvision transform: {error}", _KEY) from None
    places = np.arange(samples)
    augmentation = Drawing(known.Compose(steps), seed, workload, places)
    # One black picture, so that a transform that fails is reported before the run.
    black = np.zeros((1, *shape), np.float32)
    augmentation(black, places[:1], epoch=0)
    return augmentation

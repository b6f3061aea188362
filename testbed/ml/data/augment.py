"""Augmentation of training images: random transforms of torchvision, with new random numbers in each epoch.

The controller transforms the images of all epochs before a run, so devices need no torchvision.
"""

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

_AUGMENT_KEY: Key = ("data", "augment")
"""Key of the scenario's workload, which errors name."""
_TRANSFORMS_KEY: Key = (*_AUGMENT_KEY, "transforms")


@dataclass(frozen=True)
class Augmentation:
    """Augments images as a function of seed, epoch and sample index: a sample is the same on every owner."""

    transform: Any
    """The composed torchvision transforms, from an image, (channels, height, width), to one of the same shape."""
    seed: int
    workload: LearningPart
    """The workload, which gives the number of epochs."""
    sample_indices: Indices
    """(samples,): indices, among all training samples, of the samples of this object's subset."""

    @property
    def copies(self) -> int:
        """Number of different augmented versions of a sample; further epochs repeat the versions."""
        workload = self.workload
        part = workload.data.augment
        if part is not None and part.copies is not None:
            return part.copies
        # By default, every epoch has a version of its own.
        if workload.steps is None:
            return workload.epochs or 1
        samples = len(self.sample_indices)
        per_epoch = steps_per_epoch(
            samples, workload.batch_size, drop_last=workload.drop_last
        )
        return math.ceil(workload.steps / per_epoch)

    def subset(self, indices: Indices) -> Augmentation:
        """Return the augmentation of the samples with these indices, (samples of the subset,), in this subset."""
        return replace(self, sample_indices=self.sample_indices[indices])

    def __call__(
        self,
        images: npt.NDArray[Any],
        indices: Indices,
        epoch: int,
    ) -> npt.NDArray[np.float32]:
        """Return the augmented images of an epoch, (samples, channels, height, width).

        Args:
            images: the images without augmentation, of the same shape.
            indices: (samples,): the index of each image in this object's subset.
            epoch: number of the epoch, from 0.

        Raises `InputError` for a transform that does not accept the images or changes their shape.
        """
        augmented = np.empty(images.shape, np.float32)
        # Transforms draw from the global generators of torch and of Python: both are restored.
        state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            for position, index in enumerate(indices):
                sample_index = int(self.sample_indices[index])
                # Within the loop, since `copies` needs at least one sample.
                copy = epoch % self.copies
                seed = derive(self.seed, "augment", copy, sample_index)
                # Not `torch.manual_seed`, which formats the stack for accelerators and takes longer.
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                image = torch.tensor(images[position])
                try:
                    augmented[position] = self.transform(image)
                except (TypeError, ValueError, RuntimeError) as error:
                    shape = images.shape[1:]
                    text = f"images of {shape} do not support this transform, or change their shape: {error}"
                    raise InputError(text, _TRANSFORMS_KEY) from None
        random.setstate(state)
        return augmented


def make_augmentation(
    workload: LearningPart,
    seed: int,
    shape: tuple[int, ...],
    samples: int,
) -> Augmentation:
    """Return the augmentation configured by a workload.

    ``shape`` is the shape of a sample, and ``samples`` the number of training samples.

    Raises `InputError` for samples other than images, unknown transforms, and transforms changing the shape.
    """
    assert workload.data.augment is not None
    if len(shape) != 3:
        raise InputError(
            f"requires images, but the samples have shape {shape}: remove the key",
            _AUGMENT_KEY,
        )
    library = require_extra(
        "torchvision.transforms", "vision", "augmentation", _TRANSFORMS_KEY
    )
    transforms = []
    try:
        for configured in workload.data.augment.transforms:
            options = dict(configured)
            name = options.pop("name")
            transform_class = getattr(library, name)
            transforms.append(transform_class(**options))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"unknown torchvision transform: {error}"
        raise InputError(text, _TRANSFORMS_KEY) from None
    sample_indices = np.arange(samples)
    composed = library.Compose(transforms)
    augmentation = Augmentation(composed, seed, workload, sample_indices)
    # The augmentation of a black image reports a failing transform before the run.
    black = np.zeros((1, *shape), np.float32)
    augmentation(black, sample_indices[:1], epoch=0)
    return augmentation

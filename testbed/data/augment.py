"""Training pictures changed at random by transforms of torchvision, drawn before a run: devices need no torchvision."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from testbed.common.errors import InputError, Key
from testbed.common.lazy import need, torch
from testbed.common.seeds import derive
from testbed.data.dataset import Dataset
from testbed.workload import AugmentPart

_KEY: Key = ("data", "augment", "transforms")


def augmented(dataset: Dataset, part: AugmentPart, seed: int) -> Dataset:
    """Return a set with several copies of each training sample, each drawn anew by the seed.

    Raises `InputError` for samples that are no pictures, transforms that there are not, and those that change shapes.
    """
    if len(dataset.shape) != 3 or dataset.fields:
        raise InputError(f"is for pictures, and these samples are of {dataset.shape}: leave it out", _KEY[:-1])
    known = need("torchvision.transforms", "vision", "augmentation", _KEY)
    try:
        steps = [
            getattr(known, each["name"])(**{key: value for key, value in each.items() if key != "name"})
            for each in part.transforms
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"no such transform of torchvision: {error}", _KEY) from None
    chain, state = known.Compose(steps), random.getstate()
    images = np.empty((part.copies * len(dataset.train_labels), *dataset.shape), np.float32)
    with torch.random.fork_rng(devices=[]):
        for place in range(len(images)):
            copy, index = divmod(place, len(dataset.train_labels))
            drawn = derive(seed, "augment", copy, index)
            torch.manual_seed(drawn)
            random.seed(drawn)
            try:
                images[place] = chain(torch.from_numpy(dataset.batch(np.array([index]), 0)[0]))
            except (TypeError, ValueError, RuntimeError) as error:
                text = f"pictures of {dataset.shape} cannot be changed so, or have another shape then: {error}"
                raise InputError(text, _KEY) from None
    random.setstate(state)
    return replace(dataset, train_images=images)

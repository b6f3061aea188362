"""A network in plain torch, without imports of the testbed."""

from torch import nn


class Network(nn.Sequential):
    """Two convolutions and a fully connected layer."""

    def __init__(self, shape, classes, width):
        """``shape`` and ``classes`` come from the data, ``width`` from the scenario."""
        channels, height, across = shape
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (height // 2) * (across // 2), classes),
        )

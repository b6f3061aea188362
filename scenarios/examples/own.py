"""A network and data of one's own: nothing here knows the testbed."""

import torch
from torch import nn


class Block(nn.Module):
    """Adds what two convolutions make of a picture to the picture."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        """Map (samples, channels, height, width) to the same shape."""
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def build(shape, classes, width=8, blocks=3):
    """Return the network; the data's shape and classes are passed to arguments of these names."""
    return nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1),
        nn.ReLU(),
        *(Block(width) for _ in range(blocks)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * shape[1] * shape[2] // 4, classes),
    )


def load():
    """Return training and test samples: arrays or tensors of samples and labels, or torch data sets."""
    from sklearn.datasets import (
        load_digits,
    )  # here, since devices read this file for its network and have no sklearn

    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

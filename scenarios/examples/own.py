"""A user's own network and data, without imports from the testbed."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        """Map (samples, channels, height, width) to the same shape."""
        hidden = torch.relu(self.first(x))
        return torch.relu(x + self.second(hidden))


def build(shape, classes, width=8, blocks=3):
    """Return the network; arguments named ``shape`` and ``classes`` receive those of the data."""
    channels, height, columns = shape
    layers = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    layers += [Block(width) for _ in range(blocks)]
    features = width * height * columns // 4
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(features, classes)]
    return nn.Sequential(*layers)


def load():
    """Return training and test samples, each as (samples, labels): arrays, tensors or torch data sets."""
    # Imported here, since devices read this file for its network and have no scikit-learn.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

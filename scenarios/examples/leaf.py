"""Handwriting by writer, as LEAF's FEMNIST has it: its JSON files where they are, else digits of made-up writers."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path("femnist")
"""What LEAF's preprocess.sh leaves in data/femnist/data, train and test, where the run is started."""


def load():
    """Return training and test samples: pictures, who wrote them, and their classes."""
    if FOLDER.is_dir():
        return part(FOLDER / "train"), part(FOLDER / "test")
    return written()


def part(folder):
    """Read LEAF's files: by user x, pictures of 784 values, and y, their classes."""
    pictures, writers, labels = [], [], []
    for file in sorted(folder.glob("*.json")):
        for user, data in json.loads(file.read_text())["user_data"].items():
            pictures += data["x"]
            labels += data["y"]
            writers += [user] * len(data["y"])
    images = np.array(pictures, np.float32).reshape(-1, 1, 28, 28)
    return {"image": images, "writer": np.array(writers)}, np.array(labels)


def written(writers=40):
    """Give each of some writers digits, some many and some few, and a hand of its own: where, how bold, how light."""
    from sklearn.datasets import load_digits

    digits, draws = load_digits(), np.random.default_rng(1)
    images = np.pad(digits.images / 16, ((0, 0), (2, 2), (2, 2))).astype(np.float32)
    who = draws.choice(writers, len(images), p=draws.dirichlet(np.full(writers, 2.0)))
    for writer in range(writers):
        mine = who == writer
        images[mine] = np.roll(
            images[mine], draws.integers(-1, 2, 2), (1, 2)
        ) ** draws.uniform(0.5, 2)
        images[mine] *= draws.uniform(0.5, 1)
    test = np.arange(len(images)) % 10 == 0
    samples = {"image": images[:, None], "writer": who}
    parts = [
        ({name: each[chosen] for name, each in samples.items()}, digits.target[chosen])
        for chosen in (~test, test)
    ]
    return tuple(parts)

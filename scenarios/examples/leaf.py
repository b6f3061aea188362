"""Handwriting by writer: LEAF's FEMNIST from its JSON files, or scikit-learn's digits with made-up writers."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path("femnist")
"""A copy of LEAF's data/femnist/data (its preprocess.sh writes train and test), where the run is started."""


def load():
    """Return training and test samples, each as (inputs, labels); inputs have an image and its writer."""
    if FOLDER.is_dir():
        return read_folder(FOLDER / "train"), read_folder(FOLDER / "test")
    return make_writers()


def read_folder(folder):
    """Read LEAF's files: for each user x, a list of images of 784 values, and y, the list of their classes."""
    images = []
    writers = []
    labels = []
    for file in sorted(folder.glob("*.json")):
        for user, data in json.loads(file.read_text())["user_data"].items():
            images += data["x"]
            labels += data["y"]
            writers += [user] * len(data["y"])
    images = np.array(images, np.float32).reshape(-1, 1, 28, 28)
    return {"image": images, "writer": np.array(writers)}, np.array(labels)


def make_writers(writers=40):
    """Divide the digits unevenly among writers, each with a position, boldness and brightness of their own."""
    # Imported here, so that LEAF's own files are read without scikit-learn.
    from sklearn.datasets import load_digits

    digits = load_digits()
    random = np.random.default_rng(1)
    # A border of two, so that a shift by one pixel cuts nothing off.
    images = np.pad(digits.images / 16, ((0, 0), (2, 2), (2, 2))).astype(np.float32)
    productivity = random.dirichlet(np.full(writers, 2.0))
    writer_of = random.choice(writers, len(images), p=productivity)
    for writer in range(writers):
        own = writer_of == writer
        shift = random.integers(-1, 2, 2)
        boldness = random.uniform(0.5, 2)
        brightness = random.uniform(0.5, 1)
        images[own] = np.roll(images[own], shift, (1, 2)) ** boldness
        images[own] *= brightness
    is_test = np.arange(len(images)) % 10 == 0
    images = images[:, None]

    def select(chosen):
        inputs = {"image": images[chosen], "writer": writer_of[chosen]}
        return inputs, digits.target[chosen]

    return select(~is_test), select(is_test)

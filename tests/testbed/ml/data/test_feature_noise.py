"""Feature noise, which differs between devices."""

from __future__ import annotations

import pytest

from testbed.ml.preparation import load_data, samples_by_class, samples_of, shares_of
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from tests.helpers.runs import make_scenario


def test_feature_noise_grows_from_device_to_device() -> None:
    variance, samples = 0.5, 400
    data = {"name": "digits", "train": samples, "split": {"noise": variance}}
    (trial,) = trials(
        make_scenario(4, workload={"data": data}, method={"name": "federated"})
    )
    prepared = prepare(trial)
    total = 0
    for counts in samples_by_class(prepared).values():
        total += sum(counts.values())
    assert total == samples
    dataset = load_data(prepared)
    shares = shares_of(prepared)
    measured = []
    for name, share in shares.items():
        noisy = samples_of(prepared, dataset, name).train_images
        noise = noisy - dataset.train_images[share]
        measured.append(float(noise.std() ** 2))
    # Device i of n has noise of the variance i/n of the given one.
    count = len(shares)
    expected = [variance * number / count for number in range(1, count + 1)]
    assert measured == pytest.approx(expected, rel=0.1)

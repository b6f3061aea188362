"""From `network.radio` and positions to links, and what cannot be."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.radio import Propagation
from testbed.scenario.expand import trials
from testbed.scenario.loading import validate
from testbed.scenario.schema import Source

EDGEPIPE = Propagation(
    transmit_power=16,
    sensitivity=-82,
    path_loss_exponent=3.1,
    reference_loss=46.68,
    shadowing=8,
)

WORKLOAD = {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1}

RADIO = {"area": [50, 50]}


def experiment(**parts):
    base = {
        "name": "small",
        "devices": {"a": {}, "b": {}, "c": {}},
        "workload": WORKLOAD,
    }
    return trials(validate({**base, **parts}, Source("small.yaml")))[0].experiment


def refusal(**parts) -> str:
    with pytest.raises(InputError) as caught:
        experiment(**parts)
    return str(caught.value)


def test_a_radio_makes_the_links_message_loss_and_single_links_may_differ():
    devices = {
        "a": {"position": [0, 0]},
        "b": {"position": [30, 40]},
        "c": {"position": [0, 1]},
    }
    network = {
        "link": {"preset": "802.15.4"},
        "radio": RADIO,
        "links": [{"from": "a", "to": "c", "message_loss": "7%"}],
    }
    found = experiment(devices=devices, network=network)
    assert found.radio.positions == {"a": (0, 0), "b": (30, 40), "c": (0, 1)}
    assert found.links["a", "b"].message_loss == 1 - EDGEPIPE.reception_ratio(50)
    assert found.links["a", "b"].rate == 250e3
    assert found.links["a", "c"].message_loss == 0.07
    assert found.links["c", "a"].message_loss < 1e-9


def test_power_and_sensitivity_beside_a_preset_win():
    devices = {"a": {"position": [0, 0]}, "b": {"position": [10, 0]}}
    radio = {
        "area": [50, 50],
        "preset": "802.15.4",
        "transmit_power": -10,
        "shadowing": 0,
    }
    assert (
        experiment(devices=devices, network={"radio": radio})
        .links["a", "b"]
        .message_loss
        == 0
    )
    radio["sensitivity"] = -80
    assert (
        experiment(devices=devices, network={"radio": radio})
        .links["a", "b"]
        .message_loss
        == 1
    )


@pytest.mark.parametrize("mean", [0.5767, 0.777, 0.848])
def test_links_of_a_layout_have_the_mean_reception_that_is_asked_for_and_keep_their_order(
    mean,
):
    devices = {"pi": {"count": 6}}
    usual, asked = (
        experiment(devices=devices, network={"radio": {**RADIO, **keys}})
        for keys in ({}, {"mean_reception": f"{mean:.2%}"})
    )
    ratios = {pair: 1 - link.message_loss for pair, link in asked.links.items()}
    assert sum(ratios.values()) / len(ratios) == pytest.approx(mean, abs=1e-6)
    by_ratio = sorted(ratios, key=ratios.__getitem__)
    assert by_ratio == sorted(
        ratios,
        key=lambda pair: (1 - usual.links[pair].message_loss, by_ratio.index(pair)),
    )


SIX_DEVICES = [f"pi{number}" for number in range(1, 7)]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"path_loss_exponent": 3.7}, 6),
        ({"area": [100, 100]}, 6),
        ({}, 2),
    ],
)
def test_power_of_reference_configuration_is_used_in_other_configuration(
    changes, count
):
    reference = {**RADIO, "path_loss_exponent": 3.1, "area": [50, 50]}
    calibrated = experiment(
        devices={"pi": {"count": 6}},
        network={"radio": {**reference, "mean_reception": "80.9%"}},
    )
    at = {"path_loss_exponent": 3.1, "area": [50, 50], "devices": SIX_DEVICES}
    radio = {**reference, **changes, "mean_reception": "80.9%", "mean_reception_at": at}
    other = experiment(devices={"pi": {"count": count}}, network={"radio": radio})
    power = calibrated.radio.propagation.transmit_power
    assert other.radio.propagation.transmit_power == power


def test_another_seed_puts_devices_elsewhere_and_without_a_radio_nothing_is_lost():
    first, second = (experiment(network={"radio": RADIO}, seed=seed) for seed in (1, 2))
    assert first.radio.positions != second.radio.positions
    assert first.links != second.links
    without = experiment()
    assert without.radio is None
    assert all(link.message_loss == 0 for link in without.links.values())


@pytest.mark.parametrize(
    ("network", "devices", "said"),
    [
        (
            {"radio": RADIO},
            {"a": {"position": [51, 0]}},
            "devices.a.position: [51, 0] is outside of the area: use [0",
        ),
        (
            {"radio": RADIO},
            {"a": {"position": [0, -1]}},
            "devices.a.position: [0, -1] is outside of the area",
        ),
        (
            {"radio": RADIO},
            {"a": {"count": 2, "position": [0, 1]}},
            "devices.a.position: would put 2 devices in one",
        ),
        (
            {},
            {"a": {"position": [0, 0]}},
            "devices.a.position: requires `network.radio`",
        ),
        ({"radio": {}}, {"a": {}}, "network.radio.area: is missing"),
        ({"radio": {"area": [0, 5]}}, {"a": {}}, "network.radio.area.0: "),
        (
            {"radio": {**RADIO, "path_loss_exponent": 0}},
            {"a": {}},
            "network.radio.path_loss_exponent: ",
        ),
        ({"radio": {**RADIO, "shadowing": -1}}, {"a": {}}, "network.radio.shadowing: "),
        ({"radio": {**RADIO, "packets": 0}}, {"a": {}}, "network.radio.packets: "),
        (
            {"radio": {**RADIO, "mean_reception": "100%"}},
            {"a": {}},
            "network.radio.mean_reception: ",
        ),
        (
            {"radio": {**RADIO, "mean_reception": "80%"}},
            {"a": {}},
            "mean_reception: needs two devices at least and some",
        ),
        (
            {"radio": {**RADIO, "mean_reception": "80%", "shadowing": 0}},
            {"a": {"count": 2}},
            "mean_reception: needs two devices at least and some shadowing",
        ),
        (
            {"radio": {**RADIO, "mean_reception": "80%", "transmit_power": 3}},
            {"a": {"count": 2}},
            "mean_reception: determines the transmit power: remove `transmit_power`",
        ),
        (
            {"radio": {**RADIO, "mean_reception_at": {"area": [9, 9]}}},
            {"a": {"count": 2}},
            "mean_reception_at: requires `mean_reception`: add the ratio",
        ),
        (
            {
                "radio": {
                    **RADIO,
                    "mean_reception": "80%",
                    "mean_reception_at": {"devices": ["a1"]},
                }
            },
            {"a": {"count": 2}},
            "mean_reception: needs two devices at least",
        ),
        (
            {"radio": {**RADIO, "preset": "lora"}},
            {"a": {}},
            "network.radio.preset: unknown radio 'lora': choose one of",
        ),
        (
            {"radio": RADIO, "link": {"message_loss": "3%"}},
            {"a": {}},
            "network.link.message_loss: is computed by `network.radio` for each pair",
        ),
    ],
)
def test_a_radio_that_cannot_be_is_refused_by_its_key(network, devices, said):
    text = refusal(network=network, devices=devices)
    assert said in text
    assert "\n" not in text

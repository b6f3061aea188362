"""Links computed from `network.radio` and the positions of devices, and rejected radios."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.radio import Propagation
from testbed.scenario.expand import trials
from testbed.scenario.loading import validate
from testbed.scenario.schema import Source

# The default radio, with the values of EdgePipe's simulations.
EDGEPIPE = Propagation(
    transmit_power=16,
    sensitivity=-82,
    path_loss_exponent=3.1,
    reference_loss=46.68,
    shadowing=8,
)

WORKLOAD = {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1}

RADIO = {"area": [50, 50]}


def expand_experiment(**parts):
    base = {
        "name": "small",
        "devices": {"a": {}, "b": {}, "c": {}},
        "workload": WORKLOAD,
    }
    return trials(validate({**base, **parts}, Source("small.yaml")))[0].experiment


def error_of(**parts) -> str:
    with pytest.raises(InputError) as raised:
        expand_experiment(**parts)
    return str(raised.value)


def test_radio_determines_message_loss_except_of_explicit_links():
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
    experiment = expand_experiment(devices=devices, network=network)
    links = experiment.links
    assert experiment.radio.positions == {"a": (0, 0), "b": (30, 40), "c": (0, 1)}
    # a and b are 50 m apart: a triangle of 30 and 40 m.
    assert links["a", "b"].message_loss == 1 - EDGEPIPE.reception_ratio(50)
    assert links["a", "b"].rate == 250e3
    assert links["a", "c"].message_loss == 0.07
    # At 1 m nothing is lost.
    assert links["c", "a"].message_loss < 1e-9


@pytest.mark.parametrize(
    ("keys", "loss"), [({}, 0), ({"sensitivity": -80}, 1)], ids=["power", "both"]
)
def test_power_and_sensitivity_override_preset(keys, loss):
    # In 10 m, 46.68 + 10 * 3.1 * log10(10) = 77.68 dB of -10 dBm are lost. The signal of -87.68 dBm is above the
    # preset's sensitivity of -95 dBm and below -80 dBm; without shadowing, that alone decides.
    devices = {"a": {"position": [0, 0]}, "b": {"position": [10, 0]}}
    radio = {
        "area": [50, 50],
        "preset": "802.15.4",
        "transmit_power": -10,
        "shadowing": 0,
        **keys,
    }
    experiment = expand_experiment(devices=devices, network={"radio": radio})
    assert experiment.links["a", "b"].message_loss == loss


SIX_DEVICES = {"pi": {"count": 6}}


@pytest.mark.parametrize("mean", [0.5767, 0.777, 0.848])
def test_mean_reception_is_reached_and_order_of_links_kept(mean):
    default = expand_experiment(devices=SIX_DEVICES, network={"radio": RADIO})
    radio = {**RADIO, "mean_reception": f"{mean:.2%}"}
    calibrated = expand_experiment(devices=SIX_DEVICES, network={"radio": radio})
    ratios = {pair: 1 - link.message_loss for pair, link in calibrated.links.items()}
    assert sum(ratios.values()) / len(ratios) == pytest.approx(mean, abs=1e-6)
    # In ascending order of the calibrated ratios, the default ratios ascend as well.
    ascending = sorted(ratios, key=ratios.__getitem__)
    default_ratios = [1 - default.links[pair].message_loss for pair in ascending]
    assert default_ratios == sorted(default_ratios)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        pytest.param({"path_loss_exponent": 3.7}, 6, id="exponent"),
        pytest.param({"area": [100, 100]}, 6, id="area"),
        pytest.param({}, 2, id="fewer-devices"),
    ],
)
def test_power_of_reference_configuration_applies_to_other_configuration(
    changes, count
):
    reference = {**RADIO, "path_loss_exponent": 3.1, "area": [50, 50]}
    radio = {**reference, "mean_reception": "80.9%"}
    calibrated = expand_experiment(devices=SIX_DEVICES, network={"radio": radio})
    names = [f"pi{number}" for number in range(1, 7)]
    at = {"path_loss_exponent": 3.1, "area": [50, 50], "devices": names}
    other = expand_experiment(
        devices={"pi": {"count": count}},
        network={"radio": {**radio, **changes, "mean_reception_at": at}},
    )
    power = calibrated.radio.propagation.transmit_power
    assert other.radio.propagation.transmit_power == power


def test_positions_and_links_depend_on_seed():
    first = expand_experiment(network={"radio": RADIO}, seed=1)
    second = expand_experiment(network={"radio": RADIO}, seed=2)
    assert first.radio.positions != second.radio.positions
    assert first.links != second.links


def test_links_without_radio_lose_no_messages():
    experiment = expand_experiment()
    assert experiment.radio is None
    assert {link.message_loss for link in experiment.links.values()} == {0}


@pytest.mark.parametrize(
    ("network", "devices", "message"),
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
            # A position belongs to one device.
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
            "mean_reception: requires at least two devices and shadowing",
        ),
        (
            # Without shadowing a ratio is 0 or 1, so that no power reaches a mean in between.
            {"radio": {**RADIO, "mean_reception": "80%", "shadowing": 0}},
            {"a": {"count": 2}},
            "mean_reception: requires at least two devices and shadowing",
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
            "mean_reception: requires at least two devices",
        ),
        (
            {"radio": {**RADIO, "preset": "lora"}},
            {"a": {}},
            "network.radio.preset: unknown radio 'lora': choose one of",
        ),
        (
            # A default for all links would contradict the radio.
            {"radio": RADIO, "link": {"message_loss": "3%"}},
            {"a": {}},
            "network.link.message_loss: is computed by `network.radio` for each pair",
        ),
    ],
)
def test_invalid_radio_is_rejected_at_key(network, devices, message):
    error = error_of(network=network, devices=devices)
    assert message in error
    assert "\n" not in error

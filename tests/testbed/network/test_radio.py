"""Path loss, reception ratios and positions of radios."""

from __future__ import annotations

import json
import math
from itertools import permutations

import pytest
from click.testing import CliRunner

from testbed.network.parts import PRESETS
from testbed.network.radio import TRANSCEIVERS, Propagation, Radio, draw_positions
from testbed_controller.cli.main import testbed as command_line

EDGEPIPE = Propagation(
    transmit_power=16,
    sensitivity=-82,
    path_loss_exponent=3.1,
    reference_loss=46.68,
    shadowing=8,
)
"""The area and the exponent of the EdgePipe paper, with the power and the sensitivity of 802.11a."""
AREA = (50, 50)


def device_names(count):
    return [f"d{number}" for number in range(count)]


def reception_ratios(positions, packets, seed):
    radio = Radio(EDGEPIPE, positions, packets, seed)
    return {pair: radio.reception_ratio(pair) for pair in permutations(positions, 2)}


def test_path_loss_rises_by_ten_times_exponent_per_decade():
    assert EDGEPIPE.path_loss(1) == 46.68
    assert EDGEPIPE.path_loss(10) == pytest.approx(46.68 + 31)
    assert EDGEPIPE.path_loss(100) == pytest.approx(46.68 + 62)
    # The formula does not hold below one metre.
    assert EDGEPIPE.path_loss(0) == EDGEPIPE.path_loss(0.5) == 46.68


def test_reference_loss_is_free_space_loss_of_802_11a():
    # 20 log10(4 pi f / c) dB at one metre, for the lower end of the band at 5.15 GHz.
    free_space_loss = 20 * math.log10(4 * math.pi * 5.15e9 / 299_792_458)
    assert free_space_loss == pytest.approx(46.68, abs=0.01)


def make_propagation(shadowing):
    """Return a propagation whose mean received power is the sensitivity at 100 metres."""
    return Propagation(
        transmit_power=0,
        sensitivity=-80,
        path_loss_exponent=2,
        reference_loss=40,
        shadowing=shadowing,
    )


def test_reception_ratio_follows_normal_distribution():
    radio = make_propagation(shadowing=8)
    assert radio.reception_ratio(100) == pytest.approx(0.5)
    # One deviation of 8 dB is a factor of 10^(8 / 20) in distance; the values are those of the normal distribution.
    factor = 10 ** (8 / 20)
    assert radio.reception_ratio(100 * factor) == pytest.approx(0.158655, abs=1e-6)
    assert radio.reception_ratio(100 / factor) == pytest.approx(0.841345, abs=1e-6)


@pytest.mark.parametrize(("distance", "ratio"), [(1, 1.0), (100, 1.0), (100.1, 0.0)])
def test_reception_without_shadowing_is_complete_or_none(distance, ratio):
    assert make_propagation(shadowing=0).reception_ratio(distance) == ratio


def test_mean_reception_ratio_is_close_to_edgepipe_paper():
    # The paper has 80.9 % for one layout of six devices and names neither power nor sensitivity.
    means = []
    for seed in range(100):
        positions = draw_positions(device_names(6), {}, AREA, seed)
        ratios = reception_ratios(positions, None, seed).values()
        means.append(sum(ratios) / len(ratios))
    assert sum(means) / len(means) == pytest.approx(0.80, abs=0.02)
    assert min(means) < 0.809 < max(means)


def test_drawn_position_depends_on_seed_and_name_only():
    alone = draw_positions(["b"], {}, (50, 20), seed=3)
    several = draw_positions(["a", "b", "c"], {"a": (0.0, 0.0)}, (50, 20), seed=3)
    assert several["b"] == alone["b"]
    assert several["a"] == (0.0, 0.0)
    assert several["c"] != several["b"]
    assert draw_positions(["b"], {}, (50, 20), seed=4) != alone


def test_drawn_positions_cover_area():
    positions = draw_positions(device_names(500), {}, (50, 20), seed=1).values()
    # The standard error of the mean is 50 / sqrt(12 * 500) = 0.65 metres.
    assert 24 < sum(x for x, _ in positions) / 500 < 26
    assert 18 < max(y for _, y in positions) < 20


def test_measured_ratios_scatter_around_exact_ratios():
    positions = draw_positions(device_names(20), {}, AREA, seed=1)
    exact = reception_ratios(positions, None, seed=1)
    measured = reception_ratios(positions, 50, seed=1)
    assert exact["d0", "d1"] == exact["d1", "d0"]
    # Each direction is measured on its own.
    assert any(measured[a, b] != measured[b, a] for a, b in measured)
    for ratio in measured.values():
        # A number of whole packets out of 50.
        assert ratio * 50 == pytest.approx(round(ratio * 50))
    errors = [measured[pair] - exact[pair] for pair in exact]
    assert abs(sum(errors) / len(errors)) < 0.02


def test_measured_ratios_are_reproducible():
    positions = draw_positions(device_names(20), {}, AREA, seed=1)
    first = reception_ratios(positions, 50, seed=1)
    assert first == reception_ratios(positions, 50, seed=1)


@pytest.mark.parametrize("packets", [None, 50])
def test_reception_ratio_falls_with_exponent(packets):
    positions = draw_positions(device_names(12), {}, AREA, seed=1)
    radio = Radio(EDGEPIPE, positions, packets, seed=1)
    for pair in permutations(positions, 2):
        ratios = []
        for exponent in (3.1, 3.3, 3.7, 6.0):
            ratios.append(radio.reception_ratio(pair, exponent))
        # 3.1 is the exponent of the radio itself.
        assert ratios[0] == radio.reception_ratio(pair)
        assert ratios == sorted(ratios, reverse=True)


@pytest.fixture
def radio_scenario(tmp_path):
    file = tmp_path / "radio.yaml"
    scenario = {
        "name": "radio",
        "devices": {"a": {"position": [0, 0]}, "b": {"position": [0, 50]}},
        "network": {"radio": {"area": AREA}},
        "workload": {
            "model": {"name": "mlp"},
            "method": {"name": "single"},
            "steps": 1,
        },
    }
    # JSON is valid YAML.
    file.write_text(json.dumps(scenario))
    return str(file)


def test_plan_prints_positions_and_reception_ratios(radio_scenario, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(command_line, ["plan", radio_scenario]).output
    assert "0.0, 50.0" in output
    assert "43%" in output


def test_plan_as_json_has_positions_and_reception_ratios(radio_scenario):
    output = CliRunner().invoke(command_line, ["plan", radio_scenario, "--json"]).output
    (plan,) = json.loads(output)
    expected = EDGEPIPE.reception_ratio(50)
    assert plan["radio"]["prr"]["a"]["b"] == pytest.approx(expected)
    assert plan["radio"]["positions"]["b"] == [0, 50]


@pytest.mark.parametrize("name", TRANSCEIVERS)
def test_transceiver_has_source_and_preset_with_frame(name):
    assert TRANSCEIVERS[name].source
    assert PRESETS[name].frame

"""Validation of links, cells and access of a scenario's network, and the bounds of link rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.network.checks import problems
from testbed.network.link import Cell, GilbertElliott, Link, cell_of
from testbed.network.parts import LinkPart, overlay
from testbed.scenario.expand import trials
from testbed.scenario.loading import load, validate
from testbed.scenario.schema import Source

BASE = {
    "name": "small",
    "devices": {"source": {}, "worker": {"count": 3}},
    "workload": {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1},
}
BURSTS = GilbertElliott(0.01, 0.3)


def make_experiment(**keys):
    (trial,) = trials(validate({**BASE, **keys}, Source("small.yaml")))
    return trial.experiment


def error_text(**keys) -> str:
    with pytest.raises(InputError) as error:
        make_experiment(**keys)
    return str(error.value)


@pytest.mark.parametrize(
    ("link", "name", "message"),
    [
        (
            Link(rate=7999),
            "rate",
            "7999bit is below the lowest rate that can be shaped: use at least 8kbit",
        ),
        (
            Link(rate=1e21),
            "rate",
            "1e+21bit exceeds the maximum rate: use at most 1000gbit",
        ),
        (Link(loss=1.5), "loss", "150% is more than 100%: use at most 100%"),
        (Link(message_loss=-0.1), "message_loss", "is not a fraction"),
        (Link(corrupt=float("nan")), "corrupt", "is not a fraction"),
        (Link(delay=-1), "delay", "use 0 or more"),
        (Link(delay=float("inf")), "delay", "use 0 or more"),
        (
            Link(delay=0.005, jitter=0.01),
            "jitter",
            "use a jitter of at most 5ms or a delay of at least 10ms",
        ),
        (Link(distribution="pareto"), "distribution", "'pareto' requires a jitter"),
        (Link(jitter_correlation=0.5), "jitter_correlation", "requires a jitter"),
        (
            Link(delay=1, jitter=1, jitter_correlation=1.0),
            "jitter_correlation",
            "use at most 99%",
        ),
        (Link(loss_correlation=0.5), "loss_correlation", "requires a loss"),
        (
            Link(loss_correlation=0.5, bursts=BURSTS),
            "loss_correlation",
            "cannot be combined with `bursts`",
        ),
        # 0.01 / 0.31 of the packets.
        (
            Link(loss=0.1, bursts=BURSTS),
            "loss",
            "remove one of them; these bursts lose 3.23%",
        ),
        (Link(bursts=GilbertElliott(0.0, 0.0)), "bursts.r", "use r above 0"),
        (Link(bursts=GilbertElliott(1.2, 0.5)), "bursts.p", "120% is more than 100%"),
        (Link(reorder=0.1), "reorder", "use a delay of at least 1ms"),
        (Link(limit=0), "limit", "use at least 1"),
    ],
)
def test_invalid_link_property_is_reported_with_valid_value(link, name, message):
    (problem,) = problems(link)
    assert problem.name == name
    assert message in problem.text


fractions = st.floats(0, 1)
# Full correlation is refused.
correlations = st.floats(0, 0.99)


@st.composite
def valid_links(draw) -> Link:
    link = Link(
        rate=draw(st.none() | st.floats(8e3, 1e11)),
        delay=draw(st.floats(0, 10)),
        loss=draw(fractions),
        limit=draw(st.none() | st.integers(1, 10**6)),
        message_loss=draw(fractions),
        duplicate=draw(fractions),
        corrupt=draw(fractions),
    )
    # Jitter must not exceed the delay, and a distribution requires a jitter.
    jitter = link.delay * draw(fractions)
    if jitter > 0:
        link = replace(
            link,
            jitter=jitter,
            distribution=draw(st.sampled_from(["normal", "uniform", "pareto"])),
            jitter_correlation=draw(correlations),
            reorder=draw(fractions),
        )
    if link.loss > 0:
        link = replace(link, loss_correlation=draw(correlations))
    return link


@given(valid_links())
def test_valid_link_has_no_problems(link):
    assert problems(link) == []


@pytest.mark.parametrize(
    "link",
    [
        Link(delay=0.005, jitter=0.005),
        Link(delay=0.01, jitter=0.01),
        Link(rate=8e3),
    ],
)
def test_value_suggested_by_error_is_valid(link):
    assert problems(link) == []


def overlay_link(link, **keys):
    part = LinkPart.model_validate(keys)
    return overlay(link, part, is_from_first=False)


def test_every_key_sets_link_property():
    keys = {
        "rate": "10mbit",
        "delay": "20ms",
        "jitter": "2ms",
        "distribution": "uniform",
        "jitter_correlation": "25%",
        "loss": "1%",
        "loss_correlation": "10%",
        "message_loss": "5%",
        "duplicate": "2%",
        "reorder": "3%",
        "corrupt": "4%",
        "limit": 50,
    }
    assert overlay_link(Link(), **keys) == Link(
        rate=10e6,
        delay=0.02,
        jitter=0.002,
        distribution="uniform",
        jitter_correlation=0.25,
        loss=0.01,
        loss_correlation=0.1,
        bursts=None,
        message_loss=0.05,
        duplicate=0.02,
        reorder=0.03,
        corrupt=0.04,
        limit=50,
    )


def test_keys_of_bursts_set_bursts_of_link():
    link = overlay_link(Link(), bursts={"p": "1%", "r": "25%", "good_loss": "0.1%"})
    # All packets are lost in the bad state by default.
    expected = GilbertElliott(p=0.01, r=0.25, bad_loss=1.0, good_loss=0.001)
    assert link.bursts == expected


def test_loss_and_bursts_replace_each_other():
    correlated = Link(loss=0.1, loss_correlation=0.5)
    bursty = overlay_link(correlated, bursts={"p": "1%", "r": "25%"})
    assert (bursty.loss, bursty.loss_correlation) == (0, 0)
    assert bursty.bursts == GilbertElliott(0.01, 0.25)
    assert overlay_link(bursty, loss="2%") == Link(loss=0.02)
    assert overlay_link(correlated, loss=0) == Link()


def test_zero_jitter_removes_distribution_and_correlation():
    link = Link(delay=0.1, jitter=0.01, distribution="pareto", jitter_correlation=0.5)
    assert overlay_link(link, jitter=0) == Link(delay=0.1)
    assert overlay_link(link, jitter="5ms").distribution == "pareto"


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            {"link": {"delay": "5ms", "jitter": "6ms"}},
            "network.link.jitter: a jitter of 6ms is above the delay of 5ms: use a jitter of at most 5ms or a delay of "
            "at least 6ms",
        ),
        (
            {"link": {"rate": "1kbit"}},
            "network.link.rate: 1000bit is below the lowest rate",
        ),
        ({"link": {"rate": 0}}, "network.link.rate: 0bit is below the lowest rate"),
        (
            {"link": {"rate": "1e8gbit"}},
            "network.link.rate: 1e+17bit exceeds the maximum rate",
        ),
        (
            {"cells": [{"rate": "1e8gbit"}]},
            "network.cells.0.rate: 1e+17bit exceeds the maximum rate",
        ),
        (
            {"link": {"loss": "101%"}},
            "network.link.loss: '101%' is more than 100%: write at most 100%",
        ),
        (
            {"link": {"distribution": "normal"}},
            "network.link.distribution: 'normal' requires a jitter",
        ),
        (
            {"link": {"bursts": {"p": 0, "r": 0}}},
            "network.link.bursts.r: with p and r both 0",
        ),
        (
            {
                "link": {"delay": "5ms"},
                "links": [{"between": ["source", "worker1"], "jitter": "9ms"}],
            },
            "network.links.0.jitter: a jitter of 9ms is above the delay of 5ms",
        ),
        (
            {
                "link": {"delay": "5ms", "jitter": "2ms"},
                "links": [{"between": ["source", "worker1"], "delay": "1ms"}],
            },
            "network.links.0: a jitter of 2ms is above the delay of 1ms",
        ),
        (
            {"cells": [{"devices": ["worker1"], "rate": "1mbit"}]},
            "network.cells.0.devices: a cell requires at least two devices",
        ),
        (
            {"cells": [{"devices": ["wurker", "source"], "rate": "1mbit"}]},
            "did you mean 'worker'?",
        ),
        ({"cells": [{"rate": "1kbit"}]}, "network.cells.0.rate: 1000bit is below"),
        (
            {
                "cells": [
                    {"rate": "1mbit"},
                    {"devices": ["worker1", "worker3"], "rate": "1mbit"},
                ]
            },
            "network.cells.1.devices: 'worker1' and 'worker3' are both in cell 0 as well",
        ),
    ],
)
def test_invalid_network_is_refused_with_key(network, message):
    assert message in error_text(network=network)


def test_error_names_file_and_line(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "name: bad\ndevices: {a: {}, b: {}}\nnetwork:\n  link:\n    delay: 1ms\n    jitter: 2ms\n"
        "workload: {model: {name: mlp}, method: {name: single}, steps: 1}\n"
    )
    with pytest.raises(InputError, match=r"bad\.yaml:6: network\.link\.jitter: "):
        trials(load(file))


def make_cells(*cells):
    return make_experiment(network={"cells": list(cells)}).cells


def test_cell_accepts_group_name_and_defaults_to_all_devices():
    (cell,) = make_cells({"devices": ["source", "worker"], "rate": "250kbit"})
    assert cell == Cell(("source", "worker1", "worker2", "worker3"), 250e3)
    assert make_cells({"rate": "250kbit"}) == (cell,)


def test_pair_belongs_to_cell_of_both_devices():
    cells = make_cells({"devices": ["source", "worker1"], "rate": "1mbit"})
    assert cell_of(("source", "worker1"), cells) == cells[0]
    assert cell_of(("source", "worker2"), cells) is None


def test_device_has_access_rates_and_slowdown():
    keys = {
        "uplink": "5mbit",
        "downlink": "20mbit",
        "slowdown": 4,
        "speed": "1gflops",
    }
    (device,) = make_experiment(devices={"a": keys}).devices
    assert (device.uplink, device.downlink) == (5e6, 20e6)
    assert (device.slowdown, device.speed) == (4, 1e9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"uplink": "1kbit"}, "devices.a.uplink: 1000bit is below"),
        (
            {"slowdown": 4},
            "devices.a.slowdown: the host's speed is unknown to planners",
        ),
        (
            {"slowdown": 0.5, "speed": "1gflops"},
            "devices.a.slowdown: '0.5' must be at least 1",
        ),
    ],
)
def test_invalid_access_or_slowdown_is_refused(keys, message):
    assert message in error_text(devices={"a": keys})


ACCESS_DEVICES = {
    "a": {"uplink": "5mbit"},
    "b": {"downlink": "2mbit"},
    "c": {},
    "d": {},
}


def test_bounded_link_has_minimum_of_link_access_and_cell_rates():
    cells = [{"devices": ["c", "d"], "rate": "250kbit"}]
    experiment = make_experiment(
        devices=ACCESS_DEVICES,
        network={"link": {"rate": "10mbit", "delay": "1ms"}, "cells": cells},
    )
    rates = {pair: link.rate for pair, link in experiment.bounded_links().items()}
    assert rates["a", "b"] == 2e6
    assert rates["a", "c"] == 5e6
    # An uplink does not limit the opposite direction.
    assert rates["b", "a"] == rates["c", "a"] == 10e6
    assert rates["c", "d"] == rates["d", "c"] == 250e3


def test_bounded_link_is_unlimited_without_any_rate():
    experiment = make_experiment()
    assert experiment.bounded_links() == experiment.links
    bounded = make_experiment(devices=ACCESS_DEVICES).bounded_links()
    assert bounded["c", "d"].rate is None
    assert bounded["c", "b"].rate == 2e6

"""Links that cannot be had are refused by name, with the nearest value that would work."""

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


def expand(**parts):
    (trial,) = trials(validate({**BASE, **parts}, Source("small.yaml")))
    return trial.experiment


def refusal(**parts) -> str:
    with pytest.raises(InputError) as caught:
        expand(**parts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("link", "name", "said"),
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
            "bursts have a memory of their own",
        ),
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
def test_impossible_links_are_reported(link, name, said):
    (found,) = problems(link)
    assert found.name == name
    assert said in found.text


FRACTION = st.floats(0, 1)
CORRELATION = st.floats(0, 0.99)


@given(
    delay=st.floats(0, 10),
    share=FRACTION,
    distribution=st.sampled_from(["normal", "uniform", "pareto"]),
    loss=FRACTION,
    correlations=st.tuples(CORRELATION, CORRELATION),
    others=st.tuples(FRACTION, FRACTION, FRACTION, FRACTION),
    limit=st.none() | st.integers(1, 10**6),
    rate=st.none() | st.floats(8e3, 1e11),
)
def test_possible_links_are_accepted(
    delay, share, distribution, loss, correlations, others, limit, rate
):
    link = Link(rate=rate, delay=delay, loss=loss, limit=limit)
    link = replace(link, message_loss=others[0], duplicate=others[1], corrupt=others[2])
    if delay * share > 0:
        link = replace(
            link,
            jitter=delay * share,
            distribution=distribution,
            jitter_correlation=correlations[0],
        )
        link = replace(link, reorder=others[3])
    if loss > 0:
        link = replace(link, loss_correlation=correlations[1])
    assert problems(link) == []


def test_nearest_value_works():
    assert (
        problems(Link(delay=0.005, jitter=0.005))
        == problems(Link(delay=0.01, jitter=0.01))
        == []
    )
    assert problems(Link(rate=8e3)) == []


def part(**keys):
    return LinkPart.model_validate(keys)


def test_every_figure_reaches_the_link():
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
    assert overlay(Link(), part(**keys), False) == Link(
        10e6, 0.02, 0.002, "uniform", 0.25, 0.01, 0.1, None, 0.05, 0.02, 0.03, 0.04, 50
    )
    bursts = overlay(
        Link(), part(bursts={"p": "1%", "r": "25%", "good_loss": "0.1%"}), False
    ).bursts
    assert bursts == GilbertElliott(0.01, 0.25, 1.0, 0.001)


def test_loss_and_bursts_of_different_levels_replace_each_other():
    bursty = overlay(
        Link(loss=0.1, loss_correlation=0.5),
        part(bursts={"p": "1%", "r": "25%"}),
        False,
    )
    assert (bursty.loss, bursty.loss_correlation, bursty.bursts) == (
        0,
        0,
        GilbertElliott(0.01, 0.25),
    )
    assert overlay(bursty, part(loss="2%"), False) == Link(loss=0.02)
    assert overlay(Link(loss=0.1, loss_correlation=0.5), part(loss=0), False) == Link()


def test_zero_jitter_removes_its_distribution():
    link = Link(delay=0.1, jitter=0.01, distribution="pareto", jitter_correlation=0.5)
    assert overlay(link, part(jitter=0), False) == Link(delay=0.1)
    assert overlay(link, part(jitter="5ms"), False).distribution == "pareto"


@pytest.mark.parametrize(
    ("network", "said"),
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
def test_scenarios_are_refused_where_it_was_written(network, said):
    assert f"small.yaml: {said}" in refusal(network=network) or said in refusal(
        network=network
    )


def test_refusal_names_file_and_line(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "name: bad\ndevices: {a: {}, b: {}}\nnetwork:\n  link:\n    delay: 1ms\n    jitter: 2ms\n"
        "workload: {model: {name: mlp}, method: {name: single}, steps: 1}\n"
    )
    with pytest.raises(InputError, match=r"bad\.yaml:6: network\.link\.jitter: "):
        trials(load(file))


def test_cells_take_groups_and_default_to_everybody():
    (cell,) = expand(
        network={"cells": [{"devices": ["source", "worker"], "rate": "250kbit"}]}
    ).cells
    assert cell == Cell(("source", "worker1", "worker2", "worker3"), 250e3)
    assert expand(network={"cells": [{"rate": "250kbit"}]}).cells == (cell,)
    two = expand(
        network={"cells": [{"devices": ["source", "worker1"], "rate": "1mbit"}] * 1}
    ).cells
    assert cell_of(("source", "worker1"), two) == two[0]
    assert cell_of(("source", "worker2"), two) is None


def test_access_and_slowdown_of_a_device():
    devices = {
        "a": {
            "uplink": "5mbit",
            "downlink": "20mbit",
            "slowdown": 4,
            "speed": "1gflops",
        }
    }
    (device,) = expand(devices=devices).devices
    assert (device.uplink, device.downlink, device.slowdown, device.speed) == (
        5e6,
        20e6,
        4,
        1e9,
    )
    assert "devices.a.uplink: 1000bit is below" in refusal(
        devices={"a": {"uplink": "1kbit"}}
    )
    assert "devices.a.slowdown: the host's own speed is not known" in refusal(
        devices={"a": {"slowdown": 4}}
    )
    with pytest.raises(
        InputError, match=r"devices\.a\.slowdown: '0\.5' must be at least 1"
    ):
        expand(devices={"a": {"slowdown": 0.5, "speed": "1gflops"}})


def test_plans_reckon_with_the_least_rate_on_the_way():
    devices = {"a": {"uplink": "5mbit"}, "b": {"downlink": "2mbit"}, "c": {}, "d": {}}
    cells = [{"devices": ["c", "d"], "rate": "250kbit"}]
    experiment = expand(
        devices=devices,
        network={"link": {"rate": "10mbit", "delay": "1ms"}, "cells": cells},
    )
    rates = {pair: link.rate for pair, link in experiment.bounded_links().items()}
    assert rates["a", "b"] == 2e6
    assert rates["a", "c"] == 5e6
    assert rates["b", "a"] == rates["c", "a"] == 10e6
    assert rates["c", "d"] == rates["d", "c"] == 250e3
    assert expand().bounded_links() == expand().links
    unlimited = expand(devices=devices).bounded_links()
    assert (unlimited["c", "d"].rate, unlimited["c", "b"].rate) == (None, 2e6)

"""Traces: their files, what is wrong with them, and their replay on a schedule."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.faults.conditions import StateDiff, SystemState
from testbed.faults.script import Change, TraceScript, traced_links
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.scenario.expand import trials
from testbed.scenario.link_trace import LINK_KEYS, parse
from testbed.scenario.loading import load, validate
from testbed.scenario.schema import Source

SCENARIO = """
name: traced
devices: {a: {speed: 1gflops}, b: {speed: 1gflops}}
network: {link: {rate: 50mbit, delay: 5ms}}
workload: {model: {name: mlp}, method: {name: single}, steps: 1}
trace: changes.csv
"""


def written(tmp_path, trace: str):
    file = tmp_path / "traced.yaml"
    file.write_text(SCENARIO)
    (tmp_path / "changes.csv").write_text(trace)
    return load(file)


def refusal(tmp_path, trace: str) -> str:
    with pytest.raises(InputError) as caught:
        trials(written(tmp_path, trace))
    return str(caught.value).replace(str(tmp_path), "")


def test_every_kind_of_line():
    change = parse("12.5,link a->b rate,10mbit")
    assert (change.time, change.pairs, change.link.rate) == (12.5, (("a", "b"),), 10e6)
    assert parse(" 500ms , link a <-> b delay , 40ms ").pairs == (
        ("a", "b"),
        ("b", "a"),
    )
    assert parse("1.5e+03,link a->b rate,10mbit").time == 1500
    assert parse('1,"link a->b distribution",uniform').link.distribution == "uniform"
    assert parse("0,link a->b limit,100").link.limit == 100
    assert parse("13,device a speed,200mflops").speed.speed == 200e6
    assert parse("13,device raspberry-1 slowdown,4").speed.slowdown == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,link a->b rate", "has 2 values: a line must be time,what,value"),
        ("1,link a->b,rate,10mbit", "has 4 values"),
        ("soon,link a->b rate,10mbit", "'soon' is not a duration"),
        ("-1,link a->b rate,10mbit", "is negative"),
        ("1e999,link a->b rate,10mbit", "too large for a duration"),
        (
            "1,link a->b rtae,10mbit",
            "a trace cannot change 'rtae' of a link: did you mean 'rate'?",
        ),
        ("1,link a->b bursts,10mbit", "a trace cannot change 'bursts' of a link"),
        ("1,link a->b rate,10Mbps", "'Mbps' is not a unit of rate: tc reads"),
        ("1,link a->b rate,10", "has no unit"),
        ("1,link a->b distribution,poisson", "invalid value 'poisson'"),
        (
            "1,link a b rate,10mbit",
            "is neither a link nor a device: write 'link a->b rate'",
        ),
        (
            "1,device a memory,1GiB",
            "a trace cannot change 'memory' of a device: choose one of speed, slowdown",
        ),
        ("1,device a speed,0", "must be more than 0"),
        ("1,device a slowdown,0.5", "must be at least 1"),
        ("", "has 0 values"),
    ],
)
def test_invalid_lines_are_refused(line, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(line)


@given(
    st.text(max_size=60)
    | st.builds("{},link {}->{} {},{}".format, *[st.text(max_size=8)] * 5)
)
def test_no_line_does_more_than_being_refused(line):
    try:
        assert isinstance(parse(line), Change)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - most lines are refused, a few are right


def test_file_with_comments_and_a_header(tmp_path):
    scenario = written(
        tmp_path,
        "# measured in a car\ntime,what,value\n\n1,link a->b rate,1mbit\n2,device b slowdown,2\n",
    )
    assert scenario.trace == ("1,link a->b rate,1mbit", "2,device b slowdown,2")
    (trial,) = trials(scenario)
    assert [change.time for change in trial.experiment.changes] == [1, 2]


def test_resolved_scenario_needs_no_file(tmp_path):
    scenario = written(tmp_path, "1,link a->b rate,1mbit\n")
    dumped = scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert (
        trials(validate(dumped, Source("elsewhere.yaml")))[0].experiment.changes
        == trials(scenario)[0].experiment.changes
    )


def test_sweep_over_traces(tmp_path):
    (tmp_path / "slow.csv").write_text("1,link a->b rate,1mbit\n")
    scenario = written(tmp_path, "0,device a slowdown,2\n")
    tree = scenario.model_dump(mode="json", by_alias=True, exclude_none=True) | {
        "sweep": {"trace": ["slow.csv", []]}
    }
    runs = trials(validate(tree, scenario.source))
    assert [[change.what for change in run.experiment.changes] for run in runs] == [
        ["link a->b rate"],
        [],
    ]


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (
            "#\n1,link a->b rtae,1mbit\n",
            "/changes.csv:2: trace.0: a trace cannot change 'rtae'",
        ),
        (
            "2,link a->b rate,1mbit\n1,link a->b rate,2mbit\n",
            "/changes.csv:2: trace.1: runs backwards: 1s is before the 2s of a line above: sort the lines by time",
        ),
        (
            "1,link a->c rate,1mbit\n",
            "/changes.csv:1: trace.0: unknown device 'c': choose one of a, b",
        ),
        ("1,device c speed,1gflops\n", "unknown device 'c'"),
        (
            "1,link a->a rate,1mbit\n",
            "there is no link from 'a' to 'a': add the link, or name another one",
        ),
        (
            "1,link a->b rate,1kbit\n",
            "trace.0: makes a link from a to b with an impossible property: 1000bit is below the lowest rate",
        ),
        (
            "1,link a<->b jitter,3ms\n\n2,link b->a delay,2ms\n",
            "/changes.csv:3: trace.1: makes a link from b to a with an impossible property: a jitter of 3ms",
        ),
        (
            "1,device a speed,1flops\n",
            "less than a millionth of the device's own speed: use at least 1kflops",
        ),
        ("1,device a slowdown,1e7\n", "must be at most 1e+06"),
        ("time,what,value\n", "/changes.csv: holds no entries"),
        ("1,2,3,4\n" * 50, "/changes.csv:10: trace.9: has 4 values"),
        ("1,2,3,4\n" * 50, "; and 40 more like these"),
        ("1,device a slowdown,2\n" * 10_001, "has 10001 entries, more than 10000"),
    ],
)
def test_traces_that_cannot_be(tmp_path, trace, said):
    assert said in refusal(tmp_path, trace)


def test_missing_trace_file_is_located_in_the_scenario(tmp_path):
    file = tmp_path / "traced.yaml"
    file.write_text(SCENARIO)
    with pytest.raises(
        InputError,
        match=r"traced\.yaml:6: trace: .*changes\.csv cannot be read: No such file",
    ):
        load(file)
    (tmp_path / "changes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not text"):
        load(file)


def test_malformed_trace_is_refused():
    tree = {
        "name": "x",
        "devices": {"a": {}},
        "workload": {"model": {"name": "mlp"}, "method": {"name": "single"}},
    }
    tree["workload"]["steps"] = 1
    with pytest.raises(
        InputError,
        match="trace: is neither the name of a CSV file nor a list of its lines",
    ):
        validate({**tree, "trace": [{"at": 1}]}, Source("x.yaml"))


def test_degradation_is_checked_against_traced_links():
    from testbed.faults.conditions import FaultContext
    from testbed.faults.parts import problems

    tree = {
        "name": "x",
        "devices": {"a": {}, "b": {}},
        "network": {"link": {"delay": "50ms"}},
        "workload": {
            "model": {"name": "mlp"},
            "method": {"name": "single"},
            "steps": 1,
        },
        "trace": ["5,link b->a delay,2ms"],
        "faults": [{"degrade": {"between": ["a", "b"], "jitter": "10ms"}, "at": "1s"}],
    }
    scenario = validate(tree, Source("x.yaml"))
    found = trials(scenario)[0].experiment
    traced = [
        (pair, link) for _, pair, link in traced_links(found.links, found.changes, "a")
    ]
    (problem,) = problems(
        scenario.faults,
        FaultContext(found.devices, found.links, traced),
        lambda _: (),
        {},
    )
    assert problem.key == ("faults", 0, "degrade", "jitter")
    assert "a jitter of 10ms is above the delay of 2ms" in problem.text


def test_script_keeps_to_its_schedule():
    script = TraceScript(
        [
            parse("1,device a slowdown,2"),
            parse("1,device b slowdown,2"),
            parse("3,device a slowdown,1"),
        ]
    )
    assert script.next_deadline() == 1
    assert not script.due(0.9)
    assert [change.what for change in script.due(2.9).changes] == [
        "device a slowdown",
        "device b slowdown",
    ]
    assert script.next_deadline() == 3
    assert len(script.due(99).changes) == 1
    assert script.next_deadline() is None
    assert not script.due(999)


def test_changes_of_links_and_speeds():
    before = SystemState.of(
        [DeviceSpec("a", 1e9, 1e9)], {("a", "b"): Link(1e6), ("b", "a"): Link(1e6)}
    )
    both = parse("1,link a<->b delay,40ms").apply(before)
    assert both.diff_since(before) == StateDiff(
        links=dict.fromkeys([("a", "b"), ("b", "a")], Link(1e6, 0.04))
    )
    slow = parse("1,device a speed,100mflops").apply(before)
    assert slow.diff_since(before) == StateDiff(speeds={"a": 0.1})


def test_all_but_bursts_may_change():
    assert {*LINK_KEYS, "bursts"} == {
        "rate",
        "delay",
        "jitter",
        "distribution",
        "jitter_correlation",
        "loss",
        "loss_correlation",
        "bursts",
        "message_loss",
        "duplicate",
        "reorder",
        "corrupt",
        "limit",
    }

"""Link traces: files, validation and schedule."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.faults.conditions import FaultContext, StateDiff, SystemState
from testbed.faults.parts import problems
from testbed.faults.script import Change, LinkTraceScript, traced_links
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


def load_scenario_with_trace(tmp_path, trace: str):
    file = tmp_path / "traced.yaml"
    file.write_text(SCENARIO)
    (tmp_path / "changes.csv").write_text(trace)
    return load(file)


def dump_scenario(scenario):
    return scenario.model_dump(mode="json", by_alias=True, exclude_none=True)


def scenario_tree(devices, **keys):
    """Return the keys of a scenario without a file."""
    workload = {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1}
    return {
        "name": "x",
        "devices": {name: {} for name in devices},
        "workload": workload,
        **keys,
    }


def test_link_line_is_parsed():
    change = parse("12.5,link a->b rate,10mbit")
    assert (change.time, change.pairs, change.link.rate) == (12.5, (("a", "b"),), 10e6)
    both_directions = parse(" 500ms , link a <-> b delay , 40ms ")
    assert both_directions.pairs == (("a", "b"), ("b", "a"))
    assert parse("1.5e+03,link a->b rate,10mbit").time == 1500
    assert parse('1,"link a->b distribution",uniform').link.distribution == "uniform"
    assert parse("0,link a->b limit,100").link.limit == 100


def test_device_line_is_parsed():
    assert parse("13,device a speed,200mflops").speed.speed == 200e6
    assert parse("13,device raspberry-1 slowdown,4").speed.slowdown == 4


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_invalid_line_is_refused(line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(line)


@given(
    st.text(max_size=60)
    | st.builds("{},link {}->{} {},{}".format, *[st.text(max_size=8)] * 5)
)
def test_parsing_random_line_raises_nothing_but_value_error(line):
    try:
        assert isinstance(parse(line), Change)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - most random lines are refused, a few are valid


def test_comments_header_and_empty_lines_are_skipped(tmp_path):
    scenario = load_scenario_with_trace(
        tmp_path,
        "# measured in a car\ntime,what,value\n\n1,link a->b rate,1mbit\n2,device b slowdown,2\n",
    )
    assert scenario.trace == ("1,link a->b rate,1mbit", "2,device b slowdown,2")
    (trial,) = trials(scenario)
    assert [change.time for change in trial.experiment.changes] == [1, 2]


def test_dumped_scenario_contains_trace(tmp_path):
    scenario = load_scenario_with_trace(tmp_path, "1,link a->b rate,1mbit\n")
    # The file changes.csv does not exist relative to the other source.
    copy = validate(dump_scenario(scenario), Source("elsewhere.yaml"))
    (trial,) = trials(scenario)
    (trial_of_copy,) = trials(copy)
    assert trial_of_copy.experiment.changes == trial.experiment.changes


def test_sweep_accepts_trace_file_and_empty_trace(tmp_path):
    (tmp_path / "slow.csv").write_text("1,link a->b rate,1mbit\n")
    scenario = load_scenario_with_trace(tmp_path, "0,device a slowdown,2\n")
    tree = dump_scenario(scenario) | {"sweep": {"trace": ["slow.csv", []]}}
    slow, unchanged = trials(validate(tree, scenario.source))
    (change,) = slow.experiment.changes
    assert change.what == "link a->b rate"
    assert not unchanged.experiment.changes


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (
            "#\n1,link a->b rtae,1mbit\n",
            "/changes.csv:2: trace.0: a trace cannot change 'rtae'",
        ),
        (
            "2,link a->b rate,1mbit\n1,link a->b rate,2mbit\n",
            "/changes.csv:2: trace.1: is out of order: 1s is before 2s of an earlier line; sort the lines by time",
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
            "trace.0: makes a link from a to b invalid: 1000bit is below the lowest rate",
        ),
        (
            "1,link a<->b jitter,3ms\n\n2,link b->a delay,2ms\n",
            "/changes.csv:3: trace.1: makes a link from b to a invalid: a jitter of 3ms",
        ),
        (
            "1,device a speed,1flops\n",
            "less than a millionth of the device's own speed: use at least 1kflops",
        ),
        ("1,device a slowdown,1e7\n", "must be at most 1e+06"),
        ("time,what,value\n", "/changes.csv: has no entries"),
        # The first ten of several errors are reported, and the others counted.
        ("1,2,3,4\n" * 50, "/changes.csv:10: trace.9: has 4 values"),
        ("1,2,3,4\n" * 50, "; and 40 more like these"),
        ("1,device a slowdown,2\n" * 10_001, "has 10001 entries, more than 10000"),
    ],
)
def test_invalid_trace_is_refused_with_position(tmp_path, trace, message):
    with pytest.raises(InputError) as error:
        trials(load_scenario_with_trace(tmp_path, trace))
    assert message in str(error.value).replace(str(tmp_path), "")


def test_unreadable_trace_file_is_reported_at_key(tmp_path):
    file = tmp_path / "traced.yaml"
    file.write_text(SCENARIO)
    with pytest.raises(
        InputError,
        match=r"traced\.yaml:6: trace: .*changes\.csv cannot be read: No such file",
    ):
        load(file)
    # These bytes are not UTF-8.
    (tmp_path / "changes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not text"):
        load(file)


def test_trace_of_wrong_type_is_refused():
    tree = scenario_tree("a", trace=[{"at": 1}])
    with pytest.raises(
        InputError,
        match="trace: must be the name of a CSV file, or a list of its lines",
    ):
        validate(tree, Source("x.yaml"))


def test_degradation_is_checked_against_traced_links():
    tree = scenario_tree(
        "ab",
        network={"link": {"delay": "50ms"}},
        trace=["5,link b->a delay,2ms"],
        faults=[{"degrade": {"between": ["a", "b"], "jitter": "10ms"}, "at": "1s"}],
    )
    scenario = validate(tree, Source("x.yaml"))
    (trial,) = trials(scenario)
    experiment = trial.experiment
    links_after_changes = traced_links(experiment.links, experiment.changes, "a")
    traced = [(pair, link) for _, pair, link in links_after_changes]
    context = FaultContext(experiment.devices, experiment.links, traced)
    (problem,) = problems(scenario.faults, context, lambda _: (), {})
    assert problem.key == ("faults", 0, "degrade", "jitter")
    # The fault fits the link's own delay of 50 ms, but not the one after five seconds.
    assert "a jitter of 10ms is above the delay of 2ms" in problem.text


def test_script_returns_changes_when_due():
    script = LinkTraceScript(
        [
            parse("1,device a slowdown,2"),
            parse("1,device b slowdown,2"),
            parse("3,device a slowdown,1"),
        ]
    )
    assert script.next_deadline() == 1
    assert not script.pop_due(0.9)
    # Changes of one time are one step.
    assert [change.what for change in script.pop_due(2.9).changes] == [
        "device a slowdown",
        "device b slowdown",
    ]
    assert script.next_deadline() == 3
    assert len(script.pop_due(99).changes) == 1
    assert script.next_deadline() is None
    assert not script.pop_due(999)


def test_change_overrides_link_property_or_speed():
    before = SystemState.of(
        [DeviceSpec("a", 1e9, 1e9)], {("a", "b"): Link(1e6), ("b", "a"): Link(1e6)}
    )
    delayed = parse("1,link a<->b delay,40ms").apply(before)
    new_links = dict.fromkeys([("a", "b"), ("b", "a")], Link(1e6, 0.04))
    assert delayed.diff_since(before) == StateDiff(links=new_links)
    slow = parse("1,device a speed,100mflops").apply(before)
    assert slow.diff_since(before) == StateDiff(speeds={"a": 0.1})


def test_trace_may_change_every_link_property_except_bursts():
    # Bursts have several keys of their own, and a line of a trace has one value.
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

"""The shapers of several hosts as one."""

from __future__ import annotations

from controller.hosts.shaper import Shapers
from controller.lab.runstate import RunState
from testbed.network.link import Link


def test_where_no_link_crosses_hosts_there_are_no_ways() -> None:
    links = {("p", "q"): Link(rate=1e6, delay=0.01), ("q", "p"): Link(rate=1e6, delay=0.01)}
    state = RunState("run", "token", hosts={"a": ["p", "q"], "b": []})
    assert Shapers({}, state, {}, links).measured_ways() == []

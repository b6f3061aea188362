"""What keeps a device's traffic on its data network, in namespaces of its own."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from controller.shaping.chain import remove_ipv6
from controller.shaping.namespaces import Namespace, command

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


def test_a_namespace_whose_engine_left_ipv6_addresses_has_none_any_more() -> None:
    def addresses() -> list[str]:
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
        return [line.split()[-1] for line in lines if not line.endswith(" lo")]

    def work() -> tuple[list[str], list[str], list[str]]:
        command(["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"])
        for name in ("one", "two"):
            command(["ip", "link", "set", name, "up"])
        until = time.monotonic() + 10  # the kernel gives them once it has seen the link come up
        while len(before := addresses()) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        remove_ipv6()
        after = addresses()
        command(["ip", "link", "set", "one", "down"])
        command(["ip", "link", "set", "one", "up"])
        return before, after, addresses()

    with closing(Namespace.scratch()) as scratch:
        before, after, later = scratch.run(work)
    assert sorted(before) == ["one", "two"]
    assert after == later == []

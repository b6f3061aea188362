"""A lab over two engines that stand for two hosts: made, measured, broken, removed, abandoned."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import IPAMConfig, IPAMPool

from testbed.common.errors import HostError
from testbed.ml.preparation import load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.trace.events import Event
from testbed_controller.hosts import survey
from testbed_controller.hosts.contexts import reach
from testbed_controller.hosts.lab import HostsLab, open_lab
from testbed_controller.hosts.provision import copy_images
from testbed_controller.hosts.removal import remove
from testbed_controller.lab.engine import connect
from testbed_controller.lab.images import image_exists
from testbed_controller.running.emulation import emulate
from tests.helpers.engines import (
    disconnect_host,
    reconnect_host,
    run_checked,
    start_engines,
    unavailable_reason,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

TREE = {
    "name": "hosts",
    "devices": {
        "source": {"speed": "600mflops", "memory": "600MiB"},
        "worker": {"profile": "raspberry-pi-4b", "speed": "300mflops", "count": 2},
    },
    "network": {"topology": "mesh", "link": {"rate": "50mbit", "delay": "5ms"}},
    "workload": {
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "method": {
            "name": "pipeline",
            "schedule": "1f1b",
            "micro_batches": 4,
            "stall_timeout": "1s",
            "rejoin_timeout": "30s",
        },
        "batch_size": 64,
        "steps": 60,
    },
    "time_limit": "60s",
}
PLACE = {"source": "h1", "worker1": "h1", "worker2": "h2"}
ABANDONED = """
import sys, time
from tests.integration.test_hosts import PLACE, TREE
from testbed_controller.hosts.provision import copy_images
from testbed_controller.hosts.lab import HostsLab
from testbed_controller.lab.engine import connect
from testbed_controller.lab.images import image_exists
from testbed_controller.running.emulation import emulate
from testbed.ml.preparation import load_data
from testbed.common.errors import HostError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
lab = HostsLab.create(trials(Scenario.model_validate(TREE))[0], ["h1", "h2"], PLACE)
print(lab.run_id, lab._reaper._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have docker contexts h1 and h2, each of an engine of its own."""
    if why := unavailable_reason():
        pytest.skip(why)
    # Not in the folder of the tests, whose names are too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="engines-") as name,
        start_engines(Path(name), 2) as found,
    ):
        monkeypatch.setenv("DOCKER_CONFIG", f"{name}/docker")
        monkeypatch.setenv("PATH", f"{name}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_STATE_HOME", f"{name}/state")
        yield found


def left(hosts: list[str]) -> int:
    """Return how many containers and networks of any run there are."""
    clients = [reach(name).client for name in hosts]
    containers = sum(len(client.api.containers(all=True)) for client in clients)
    return containers + len(clients[0].api.networks(filters={"label": "testbed.run"}))


def test_a_lab_over_two_hosts(hosts: list[str]) -> None:
    # One test, so that one process of the tests has the engines, and has them once.
    _an_image_is_brought(hosts)
    _a_host_is_reached_by_ssh()
    _what_is_wrong_is_said(hosts)
    trial = trials(Scenario.model_validate(TREE))[0]
    lab = HostsLab.create(trial, hosts, PLACE, keep=True)
    try:
        assert {
            name: [*part.devices] for name, part in lab.parts.items()
        } == lab._state.hosts
        measured = lab.shaper.probe([*lab.experiment.links])
        assert [
            (each.source, each.destination, each.problem)
            for each in measured
            if each.problem
        ] == []
        _clocks_are_one(lab)
        _nothing_listens_outside(lab)
        _a_device_is_killed_and_comes_back(lab)
        _a_host_is_lost_and_found_again(lab)
        found = open_lab(lab.run_id)  # as another command does
        assert found.states() == dict.fromkeys(PLACE, "running")
        assert {
            each.context for each in survey.survey(hosts) if each.round_trip
        } == set(hosts)
    finally:
        lab.down()
    assert left(hosts) == 0
    _what_is_abandoned_is_removed_by_each_host(hosts)


def _an_image_is_brought(hosts: list[str]) -> None:
    here, name, archive = connect(), "testbed-brought", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    here.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
    try:
        reached = [reach(each) for each in hosts]
        copy_images(here, reached, [f"{name}:1"], print)
        assert all(image_exists(each.client, f"{name}:1") for each in reached)
    finally:
        here.images.remove(f"{name}:1")


def _a_host_is_reached_by_ssh() -> None:
    run_checked(
        "docker",
        "context",
        "create",
        "by-ssh",
        "--docker",
        "host=ssh://root@10.78.0.12",
    )
    (found,) = survey.survey(["by-ssh"])
    assert found.address == "10.78.0.12"
    assert found.round_trip, found.missing
    assert found.round_trip < 0.3  # not what the far end takes to start


def _what_is_wrong_is_said(hosts: list[str]) -> None:
    """Each with host and remedy, and nothing is left."""
    far = reach("h2").client
    pool = IPAMPool(subnet="10.79.0.0/24")
    network = far.api.create_network(
        "taken", "bridge", ipam=IPAMConfig(pool_configs=[pool])
    )["Id"]
    _is_refused(
        hosts,
        r"10\.79\.0\.0/24 is taken by the network 10\.79\.0\.0/24 of h2",
        subnet="10.79.0.0/24",
    )
    far.api.remove_network(network)
    long = "-m length --length 1401:65535"
    for match, says in (
        ("", r"open UDP 4789 between h\d .* and h\d"),
        (
            long,
            r"full frames of the overlay network.* do not: the path carries less than 1500",
        ),
    ):
        rule = ["INPUT", "-p", "udp", "--dport", "4789", *match.split(), "-j", "DROP"]
        for host in ("tb-h1", "tb-h2"):
            run_checked("ip", "netns", "exec", host, "iptables", "-I", *rule)
        _is_refused(hosts, says)
        for host in ("tb-h1", "tb-h2"):
            run_checked("ip", "netns", "exec", host, "iptables", "-D", *rule)


def _is_refused(hosts: list[str], says: str, **network: str) -> None:
    tree = {
        **TREE,
        "devices": {"source": {}, "worker1": {}},
        "network": {**TREE["network"], **network},
    }  # type: ignore[dict-item]
    began = time.monotonic()
    with pytest.raises(HostError, match=says):
        HostsLab.create(
            trials(Scenario.model_validate(tree))[0],
            hosts,
            {"source": "h1", "worker1": "h2"},
        )
    print(f"{time.monotonic() - began:.1f} s: {says}")
    assert left(hosts) == 0


def _clocks_are_one(lab: HostsLab) -> None:
    """The hosts have one clock, of one kernel: what is found between them has to be nothing."""
    now = time.monotonic()
    there = [channel.here(now) for channel in lab._channels.values()]
    assert abs(there[0] - there[1]) < 0.5e-3


def _nothing_listens_outside(lab: HostsLab) -> None:
    for part in lab.parts.values():
        for found in part._client.api.containers():
            assert not any("PublicPort" in each for each in found["Ports"])
            networks = {*found["NetworkSettings"]["Networks"]}
            assert networks in ({"none"}, {f"testbed-{lab.run_id}-data"})


def _a_device_is_killed_and_comes_back(lab: HostsLab) -> None:
    lab.kill("worker2")
    assert lab.states()["worker2"] == "exited"
    lab.start("worker2")
    lab.admit("worker2")
    pairs = [("source", "worker2"), ("worker2", "source")]
    assert [each.problem for each in lab.shaper.probe(pairs)] == [None, None]


def _a_host_is_lost_and_found_again(lab: HostsLab) -> None:
    """The run on it is told of both, and goes on as the method does about devices that are cut off."""
    at: dict[str, float] = {}
    said = []

    def see(event: Event) -> None:
        if event.event == "step" and "lost" not in at:
            at["lost"] = time.monotonic()
            disconnect_host(2)
        elif event.event == "log":
            said.append(event.fields["text"])
            if "has been silent for" in said[-1]:
                at["noticed"] = time.monotonic()
                threading.Timer(1.0, reconnect_host, [2]).start()

    prepared = prepare(lab.trial)
    outcome = emulate(
        prepared, load_data(prepared), see, standing=lab, accept_links=True
    )
    assert outcome.status == "finished", (outcome.error, said)
    assert at["noticed"] - at["lost"] < 5.0
    assert any(
        text.startswith("worker2 is on the host h2, which has been silent for 4")
        for text in said
    ), said
    assert any("away for" in text for text in said), said
    steps = [event.fields["step"] for event in outcome.events if event.event == "step"]
    assert max(steps) == 59
    assert not lab.lost


def _what_is_abandoned_is_removed_by_each_host(hosts: list[str]) -> None:
    """Controller and reaper are killed: only the keepers are left to remove a run."""
    command = [sys.executable, "-c", ABANDONED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        identity, reaper = controller.stdout.readline().split()
        os.kill(int(reaper), signal.SIGKILL)
        controller.kill()
    assert left(hosts) > 0
    deadline = time.monotonic() + 30
    while left(hosts) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left(hosts) == 0
    assert remove(identity, None) == 0

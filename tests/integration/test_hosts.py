"""A lab on two engines that stand for two hosts: creation, measurement, failures and removal."""

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
LAST_STEP = 59
ABANDONED = """
import time
from tests.integration.test_hosts import PLACE, TREE
from testbed_controller.hosts.lab import HostsLab
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario

lab = HostsLab.create(trials(Scenario.model_validate(TREE))[0], ["h1", "h2"], PLACE)
print(lab.run_id, lab._reaper._process.pid, flush=True)
time.sleep(600)
"""
"""A controller that creates a lab and waits to be killed."""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Start two engines with the docker contexts h1 and h2."""
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    # Paths in pytest's folder exceed the limit of 108 bytes for the path of a socket.
    with (
        tempfile.TemporaryDirectory(prefix="engines-") as folder,
        start_engines(Path(folder), 2) as names,
    ):
        monkeypatch.setenv("DOCKER_CONFIG", f"{folder}/docker")
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/state")
        yield names


def count_remaining(hosts: list[str]) -> int:
    """Return the number of containers and networks of all runs."""
    clients = [reach(name).client for name in hosts]
    containers = sum(len(client.api.containers(all=True)) for client in clients)
    return containers + len(clients[0].api.networks(filters={"label": "testbed.run"}))


def test_lab_on_two_hosts(hosts: list[str]) -> None:
    # One test with several parts: engines take long to start, and only one process can have them.
    _check_copied_image(hosts)
    _check_host_by_ssh()
    _check_refusals(hosts)
    trial = trials(Scenario.model_validate(TREE))[0]
    lab = HostsLab.create(trial, hosts, PLACE, keep=True)
    try:
        devices = {name: [*part.devices] for name, part in lab.parts.items()}
        assert devices == lab._state.hosts
        measurements = lab.shaper.probe([*lab.experiment.links])
        assert [link for link in measurements if link.problem] == []
        _check_equal_clocks(lab)
        _check_no_open_ports(lab)
        _check_restarted_device(lab)
        _check_disconnected_host(lab)
        # Another command opens the lab by its id.
        reopened = open_lab(lab.run_id)
        assert reopened.states() == dict.fromkeys(PLACE, "running")
        reachable = [host for host in survey.survey(hosts) if host.round_trip]
        assert {host.context for host in reachable} == set(hosts)
    finally:
        lab.down()
    assert count_remaining(hosts) == 0
    _check_removal_by_keepers(hosts)


def _check_copied_image(hosts: list[str]) -> None:
    local, archive = connect(), io.BytesIO()
    name = "testbed-brought"
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    local.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
    try:
        engines = [reach(host) for host in hosts]
        copy_images(local, engines, [f"{name}:1"], print)
        for engine in engines:
            assert image_exists(engine.client, f"{name}:1")
    finally:
        local.images.remove(f"{name}:1")


def _check_host_by_ssh() -> None:
    endpoint = "host=ssh://root@10.78.0.12"
    run_checked("docker", "context", "create", "by-ssh", "--docker", endpoint)
    (host,) = survey.survey(["by-ssh"])
    assert host.address == "10.78.0.12"
    assert host.round_trip, host.missing
    # The start of the remote command takes longer and must not count.
    assert host.round_trip < 0.3


def _check_refusals(hosts: list[str]) -> None:
    """Check the reports of problems, which name a host, and the clean-up."""
    far = reach("h2").client
    pool = IPAMPool(subnet="10.79.0.0/24")
    network = far.api.create_network(
        "taken", "bridge", ipam=IPAMConfig(pool_configs=[pool])
    )["Id"]
    _check_refusal(
        hosts,
        r"10\.79\.0\.0/24 is taken by the network 10\.79\.0\.0/24 of h2",
        subnet="10.79.0.0/24",
    )
    far.api.remove_network(network)
    # VXLAN uses UDP port 4789. Without it no packet passes between hosts; a filter of long packets passes only the
    # short ones, as a path with a small MTU does.
    long_packets = "-m length --length 1401:65535"
    for packets, message in (
        ("", r"open UDP 4789 between h\d .* and h\d"),
        (
            long_packets,
            r"full frames of the overlay network.* do not, since the path carries less than 1500",
        ),
    ):
        rule = ["INPUT", "-p", "udp", "--dport", "4789", *packets.split(), "-j", "DROP"]
        for host in ("tb-h1", "tb-h2"):
            run_checked("ip", "netns", "exec", host, "iptables", "-I", *rule)
        _check_refusal(hosts, message)
        for host in ("tb-h1", "tb-h2"):
            run_checked("ip", "netns", "exec", host, "iptables", "-D", *rule)


def _check_refusal(hosts: list[str], message: str, **network: str) -> None:
    tree = {
        **TREE,
        "devices": {"source": {}, "worker1": {}},
        "network": {**TREE["network"], **network},
    }  # type: ignore[dict-item]
    trial = trials(Scenario.model_validate(tree))[0]
    start = time.monotonic()
    with pytest.raises(HostError, match=message):
        HostsLab.create(trial, hosts, {"source": "h1", "worker1": "h2"})
    print(f"{time.monotonic() - start:.1f} s: {message}")
    assert count_remaining(hosts) == 0


def _check_equal_clocks(lab: HostsLab) -> None:
    # Both engines have the clock of one kernel, so the measured difference is the error of the measurement.
    now = time.monotonic()
    times = [channel.to_controller(now) for channel in lab._channels.values()]
    assert abs(times[0] - times[1]) < 0.5e-3


def _check_no_open_ports(lab: HostsLab) -> None:
    for part in lab.parts.values():
        for container in part._client.api.containers():
            for port in container["Ports"]:
                assert "PublicPort" not in port
            networks = {*container["NetworkSettings"]["Networks"]}
            assert networks in ({"none"}, {f"testbed-{lab.run_id}-data"})


def _check_restarted_device(lab: HostsLab) -> None:
    lab.kill("worker2")
    assert lab.states()["worker2"] == "exited"
    lab.start("worker2")
    lab.admit("worker2")
    pairs = [("source", "worker2"), ("worker2", "source")]
    problems = [link.problem for link in lab.shaper.probe(pairs)]
    assert problems == [None, None]


def _check_disconnected_host(lab: HostsLab) -> None:
    """Check the log of a run, and its method, while a host is lost and returns."""
    times: dict[str, float] = {}
    logs: list[str] = []

    def on_event(event: Event) -> None:
        if event.event == "step" and "disconnected" not in times:
            times["disconnected"] = time.monotonic()
            disconnect_host(2)
        elif event.event == "log":
            logs.append(event.fields["text"])
            if "has been silent for" in logs[-1]:
                times["noticed"] = time.monotonic()
                threading.Timer(1.0, reconnect_host, [2]).start()

    prepared = prepare(lab.trial)
    outcome = emulate(
        prepared, load_data(prepared), on_event, existing_lab=lab, accept_links=True
    )
    assert outcome.status == "finished", (outcome.error, logs)
    assert times["noticed"] - times["disconnected"] < 5.0
    # A host counts as silent after 4 s.
    silence = "worker2 is on the host h2, which has been silent for 4"
    assert any(text.startswith(silence) for text in logs), logs
    assert any("away for" in text for text in logs), logs
    steps = [event.fields["step"] for event in outcome.events if event.event == "step"]
    assert max(steps) == LAST_STEP
    assert not lab.lost


def _check_removal_by_keepers(hosts: list[str]) -> None:
    """Check the removal of a run by the hosts' keepers after a kill of controller and reaper."""
    command = [sys.executable, "-c", ABANDONED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        run_id, reaper = controller.stdout.readline().split()
        os.kill(int(reaper), signal.SIGKILL)
        controller.kill()
    assert count_remaining(hosts) > 0
    deadline = time.monotonic() + 30
    while count_remaining(hosts) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert count_remaining(hosts) == 0
    # Nothing is left for the command, either.
    assert remove(run_id, None) == 0

"""Labs of containers: privileges, isolation, failures, repairs and complete removal.

A lab is the containers and networks of one run: a container for each device, and the shaper, which emulates the links.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from pyroute2 import IPRoute

from testbed.common.errors import HostError, InputError, TestbedError
from testbed.hardware import DeviceSpec
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario, Trial
from testbed.wire.ports import CONTROL_PORT, DATA_PORT
from testbed_controller.lab import containers, runstate
from testbed_controller.lab.containers import container_name
from testbed_controller.lab.engine import connect
from testbed_controller.lab.lab import Lab
from testbed_controller.lab.removal import RUN
from testbed_controller.lab.runstate import RunState
from tests.helpers.commands import run_command
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.containers

TESTBED = Path(sys.executable).with_name("testbed")
SSH_PORT = 22
DEVICE_USER = 10001
"""User id of programs in a device's container."""


def scenario_keys(name: str) -> dict[str, Any]:
    """Return a scenario of three devices, one with a memory limit and two with a CPU quota."""
    return {
        "name": name,
        "devices": {
            "source": {"memory": "300MiB"},
            "worker": {"profile": "raspberry-pi-4b", "count": 2, "cpus": 0.5},
        },
        "network": {"link": {"rate": "50mbit", "delay": "5ms"}},
        "workload": {
            "model": {"name": "mlp"},
            "method": {"name": "single"},
            "steps": 1,
        },
    }


def make_trial(name: str, **network: str) -> Trial:
    keys = scenario_keys(name)
    keys["network"] |= network
    return trials(Scenario.model_validate(keys))[0]


@pytest.fixture(scope="module", autouse=True)
def _isolate_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Separate the labs of the tests from other labs on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def client() -> docker.DockerClient:
    return connect()


@pytest.fixture(scope="module")
def lab(_isolate_state: None) -> Iterator[Lab]:
    lab = Lab.create(make_trial("lab-test"))
    yield lab
    lab.down()


def objects_of(client: docker.DockerClient, run: str) -> list[str]:
    """Return the names of containers and networks of runs whose id starts with ``run``."""
    objects = client.api.containers(all=True, filters={"label": RUN})
    objects += client.api.networks(filters={"label": RUN})
    return [
        str(item.get("Names") or item["Name"])
        for item in objects
        if item["Labels"][RUN].startswith(run)
    ]


def run_with_input(
    input_text: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the `testbed` command in a process of its own, with a standard input."""
    return subprocess.run(
        [TESTBED, *arguments],
        input=input_text,
        capture_output=True,
        text=True,
        timeout=60,
    )


def inspect(client: docker.DockerClient, lab: Lab, name: str) -> dict[str, Any]:
    """Return the engine's description of a container of the lab."""
    description: dict[str, Any] = client.api.inspect_container(
        container_name(lab.run_id, name)
    )
    return description


def run_inside(
    client: docker.DockerClient, lab: Lab, name: str, program: str
) -> tuple[int, str]:
    """Run Python code in a device as the device's user, and return exit status and output."""
    container = client.containers.get(container_name(lab.run_id, name))
    result = container.exec_run(["python3", "-c", program])
    return int(result.exit_code or 0), result.output.decode()


def test_exec_passes_input_output_and_exit_status(lab: Lab) -> None:
    lines = "line\n" * 100_000
    program = "cat > /tmp/in; wc -l < /tmp/in; echo bad >&2; exit 7"
    in_source = ("exec", "-i", "--run", lab.run_id, "source", "--")
    completed = run_with_input(lines, *in_source, "sh", "-c", program)
    assert completed.returncode == 7
    assert completed.stdout.strip() == "100000"
    assert completed.stderr.strip() == "bad"
    # A command may end without reading its input of 10 MB.
    unread = run_with_input(20 * lines, *in_source, "true")
    assert (unread.returncode, unread.stderr) == (0, "")


def test_devices_have_minimal_privileges(lab: Lab, client: docker.DockerClient) -> None:
    host = inspect(client, lab, "source")["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["ReadonlyRootfs"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Memory"] == host["MemorySwap"] == 300 * 2**20
    assert host["PidsLimit"] > 0
    # Engines differ in how they write an absent policy and absent ports.
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert not host["PortBindings"]
    assert host["NetworkMode"] == "none"
    program = "import os; print(os.getuid()); open('/opt/x', 'w')"
    code, output = run_inside(client, lab, "source", program)
    assert code != 0
    # Standard output and standard error may come in either order.
    assert f"{DEVICE_USER}\n" in output
    assert "Read-only file system" in output


def test_shaper_adds_seccomp_filter_to_that_of_engine(
    lab: Lab, client: docker.DockerClient
) -> None:
    pid = inspect(client, lab, "shaper")["State"]["Pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t") for line in lines)
    # Mode 2 of seccomp is a filter.
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    options = client.info()["SecurityOptions"]
    engine_filters = 1 if any("seccomp" in option for option in options) else 0
    assert int(status["Seccomp_filters"]) == 1 + engine_filters


def test_idle_agent_after_requests_uses_little_memory(lab: Lab) -> None:
    for name in lab.devices:
        agent = lab.agent(name)
        agent.health()
        # The renewal of the lease is the first request that imports Flask; before, the agent takes 19 MB.
        agent.renew()
        assert agent.metrics()["testbed_resident_bytes"] < 38e6


def test_cpu_quota_is_set_only_for_devices_with_cpus(
    lab: Lab, client: docker.DockerClient
) -> None:
    quotas = {
        name: inspect(client, lab, name)["HostConfig"]["NanoCpus"]
        for name in lab.devices
    }
    # The workers have `cpus: 0.5`; 0 is no quota.
    assert quotas == {"source": 0, "worker1": 500_000_000, "worker2": 500_000_000}


def test_containers_and_network_are_labelled_with_run(
    lab: Lab, client: docker.DockerClient
) -> None:
    of_run = {"label": f"{RUN}={lab.run_id}"}
    labelled = client.api.containers(all=True, filters=of_run)
    names = {container["Names"][0].lstrip("/") for container in labelled}
    expected = ("source", "worker1", "worker2", "shaper")
    assert names == {container_name(lab.run_id, name) for name in expected}
    [network] = client.api.networks(filters=of_run)
    assert network["Name"] == f"testbed-{lab.run_id}-control"
    [shaper] = client.api.inspect_network(network["Name"])["Containers"].values()
    assert shaper["Name"] == container_name(lab.run_id, "shaper")
    ports = inspect(client, lab, "shaper")["HostConfig"]["PortBindings"]
    bindings = ports[f"{CONTROL_PORT}/tcp"]
    assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"]


def test_devices_have_successive_addresses_in_subnet(lab: Lab) -> None:
    # The first address of the subnet belongs to the gateway.
    expected = [str(lab.subnet.network_address + index) for index in (2, 3, 4)]
    assert [device.address for device in lab.devices.values()] == expected
    assert lab.broadcast == str(lab.subnet.broadcast_address)


def test_devices_reach_peers_only_on_shaped_network(
    lab: Lab, client: docker.DockerClient
) -> None:
    peer = lab.devices["worker1"].address
    program = 'import socket; socket.create_connection(("{}", {}), timeout=1.5)'
    use_data_port = program.format(peer, DATA_PORT)
    assert run_inside(client, lab, "source", use_data_port) == (0, "")
    use_control_port = program.format(peer, CONTROL_PORT)
    code, output = run_inside(client, lab, "source", use_control_port)
    assert code != 0
    assert "refused" in output
    listing = "import os; print(sorted(os.listdir('/sys/class/net')))"
    _, interfaces = run_inside(client, lab, "source", listing)
    assert interfaces == "['eth0', 'lo']\n"


PRINT_FIRST_ANSWERS = """
import select, socket

targets = TARGETS
links, poll = {}, select.poll()
for address, port in targets:
    link = socket.socket()
    link.setblocking(False)
    link.connect_ex((address, port))
    links[link.fileno()] = link, (address, port)
    poll.register(link, select.POLLOUT)
# A refusal is an answer, too. The kernel reports an absent host only after 3 s.
for number, _ in poll.poll(2000):
    print(*links[number][1])
"""
"""A program that tries to connect to `TARGETS` and prints the first ones that answer, or nothing after 2 s."""


def answering(
    client: docker.DockerClient, lab: Lab, targets: list[tuple[str, int]]
) -> tuple[int, str]:
    """Connect from the source to all targets (address, port); return exit status and first answering targets."""
    program = PRINT_FIRST_ANSWERS.replace("TARGETS", repr(targets))
    return run_inside(client, lab, "source", program)


def control_addresses(client: docker.DockerClient, lab: Lab) -> list[str]:
    network = client.api.inspect_network(f"testbed-{lab.run_id}-control")
    return [
        container["IPv4Address"].partition("/")[0]
        for container in network["Containers"].values()
    ]


def host_addresses() -> list[str]:
    with IPRoute() as route:
        addresses = {
            str(entry.get("local")) for entry in route.get_addr(family=socket.AF_INET)
        }
    return sorted(address for address in addresses if not address.startswith("127."))


def test_device_cannot_reach_host_or_other_runs(
    lab: Lab, client: docker.DockerClient
) -> None:
    # With the default subnet, the devices of both labs would have equal addresses.
    other = Lab.create(make_trial("lab-other", subnet="198.19.7.0/24"))
    try:
        with socket.create_server(("0.0.0.0", 0)) as server:
            host = host_addresses()
            server_port = server.getsockname()[1]
            targets = list(product(host, (server_port, SSH_PORT, CONTROL_PORT)))
            other_devices = [device.address for device in other.devices.values()]
            targets += product(other_devices, (CONTROL_PORT, DATA_PORT))
            shapers = control_addresses(client, lab) + control_addresses(client, other)
            targets += product(shapers, (CONTROL_PORT,))
            gateway = str(lab.subnet.network_address + 1)
            targets.append((gateway, SSH_PORT))
            # The engine may choose addresses for control networks that are also addresses of the lab's own devices,
            # which do answer.
            own = {device.address for device in lab.devices.values()}
            targets = [target for target in targets if target[0] not in own]
            assert answering(client, lab, targets) == (0, "")
            # The program does print a target that answers.
            peer = lab.devices["worker1"].address
            answer = f"{peer} {DATA_PORT}\n"
            assert answering(client, lab, [(peer, DATA_PORT)]) == (0, answer)
        program = "print(open('/proc/net/if_inet6').read())"
        _, addresses = run_inside(client, lab, "source", program)
        # The sixth column of the file is the interface.
        interfaces = set(addresses.split()[5::6])
        assert interfaces <= {"lo"}, "a link has an IPv6 address"
    finally:
        other.down()
    # A restarted device is isolated again. Its admission shapes the links.
    lab.kill("source")
    lab.start("source")
    lab.admit("source")
    assert lab.shaper.show()["devices"]["source"]["differences"] == []
    assert answering(client, lab, [(host[0], SSH_PORT)]) == (0, "")


def test_agents_and_shaper_require_token(lab: Lab) -> None:
    for url in (lab.devices["source"].control_url, lab.shaper._url):
        assert requests.get(url + "/health", timeout=5).status_code == 200
        assert requests.get(url + "/facts", timeout=5).status_code == 401
    assert lab.agent("source").facts()["device"] == "source"


def test_links_match_scenario_when_create_returns(lab: Lab) -> None:
    state = lab.shaper.show()
    for device in state["devices"].values():
        assert device["differences"] == []
    assert len(state["devices"]) == 3
    links = {(link["rate"], link["delay"]) for link in state["links"]}
    assert links == {(50e6, 0.005)}
    # Three devices have 3 * 2 directed links.
    assert len(state["links"]) == 6


def test_restarted_device_keeps_address_and_links(lab: Lab) -> None:
    before = lab.devices["worker1"]
    lab.kill("worker1")
    assert (lab.devices["worker1"].state, lab.devices["worker1"].pid) == ("exited", 0)
    # A second kill has no effect.
    lab.kill("worker1")
    with pytest.raises(TestbedError, match="worker1 is exited"):
        lab.agent("worker1")
    lab.start("worker1")
    lab.admit("worker1")
    after = lab.devices["worker1"]
    assert (after.state, after.address) == ("running", before.address)
    assert after.pid != before.pid
    assert lab.agent("worker1").health()["device"] == "worker1"
    assert lab.shaper.show()["devices"]["worker1"]["differences"] == []


def test_device_can_be_paused_and_resumed(lab: Lab) -> None:
    # Repeated actions have no effect.
    for action, state in (
        (lab.pause, "paused"),
        (lab.pause, "paused"),
        (lab.resume, "running"),
        (lab.resume, "running"),
    ):
        action("worker2")
        assert lab.devices["worker2"].state == state


def test_lab_can_be_opened_by_another_process(lab: Lab) -> None:
    reopened = Lab.open(lab.run_id)
    assert reopened.devices == lab.devices
    assert (reopened.token, reopened.subnet) == (lab.token, lab.subnet)
    assert reopened.experiment.links == lab.experiment.links
    assert reopened.shaper.facts()["backend"] == lab.shaper.facts()["backend"]
    listing = json.loads(run_with_input("", "ps", "--json").stdout)[lab.run_id]
    names = [row["name"] for row in listing]
    assert names == ["shaper", "source", "worker1", "worker2"]
    assert {row["state"] for row in listing} == {"running"}
    assert listing[3]["address"] == lab.devices["worker2"].address
    assert run_command("logs", "worker1").returncode == 0
    assert "see 'testbed ps'" in run_command("logs", "worker9").stderr


def test_unknown_device_or_run_is_an_input_error(lab: Lab) -> None:
    with pytest.raises(
        InputError, match=r"unknown device 'worker9'.*source, worker1, worker2"
    ):
        lab.kill("worker9")
    with pytest.raises(InputError, match="unknown run 'nothing'"):
        Lab.open("nothing")
    refusal = run_command("down", "nothing")
    assert (refusal.returncode, refusal.stdout) == (2, "")
    assert "unknown run 'nothing'" in refusal.stderr


def test_labs_with_equal_addresses_are_isolated_and_removed_separately(
    lab: Lab, client: docker.DockerClient
) -> None:
    other = Lab.create(make_trial("lab-other"))
    try:
        assert other.subnet == lab.subnet
        other.kill("worker1")
        # Each lab has a worker1 at this address; only the other lab's worker1 is down.
        address = lab.devices["worker1"].address
        _, answers = answering(client, lab, [(address, DATA_PORT)])
        assert answers == f"{address} {DATA_PORT}\n"
        assert answering(client, other, [(address, DATA_PORT)]) == (0, "")
        # A lab remains usable and removable without some of its containers.
        client.api.remove_container(container_name(other.run_id, "worker1"), force=True)
        client.api.remove_container(container_name(other.run_id, "shaper"), force=True)
        other.kill("worker1")
        other.refresh()
        assert other.devices["worker1"].state == "gone"
        with pytest.raises(
            TestbedError, match="was removed and cannot be started again"
        ):
            other.start("worker1")
    finally:
        other.down()
    assert objects_of(client, other.run_id) == []
    assert other.run_id not in runstate.runs()
    # A second removal reports success, too.
    assert other.down()


@pytest.mark.parametrize(
    "stage",
    ["creating the network", "starting 3 devices and the shaper", "shaping the links"],
)
def test_interrupted_creation_removes_everything(
    client: docker.DockerClient, stage: str
) -> None:
    run = runstate.new_id("lab-interrupted")

    def progress(text: str) -> None:
        if text == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lab.create(make_trial("lab-interrupted"), run, progress=progress)
    assert objects_of(client, run) == []
    assert run not in runstate.runs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"devices": {"a": {"memory": "20MiB"}, "b": {}}},
            "a has 20MiB of memory.*use at least 32MiB",
        ),
        ({"network": {"subnet": "10.9.8.0/30"}}, "no room for 3 devices"),
    ],
    ids=["memory", "subnet"],
)
def test_invalid_lab_is_refused_before_creation(
    client: docker.DockerClient, change: dict[str, Any], message: str
) -> None:
    run = runstate.new_id("lab-refused")
    keys = scenario_keys("lab-refused") | change
    invalid = trials(Scenario.model_validate(keys))[0]
    with pytest.raises(InputError, match=message):
        Lab.create(invalid, run)
    assert objects_of(client, run) == []
    assert run not in runstate.runs()


def test_failed_boot_is_reported_with_last_log_line(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runstate.new_id("lab-broken")
    original = containers.device_settings

    def broken_settings(
        state: RunState, image: str, spec: DeviceSpec, addresses: dict[str, str]
    ) -> dict[str, Any]:
        settings = original(state, image, spec, addresses)
        if spec.name == "worker2":
            program = "import sys; sys.exit('no power')"
            settings |= {"command": ["python3", "-c", program]}
        return settings

    monkeypatch.setattr("testbed_controller.lab.lab.device_settings", broken_settings)
    with pytest.raises(
        HostError,
        match="worker2 ended by itself with exit code 1; last log line: no power",
    ):
        Lab.create(make_trial("lab-broken"), run)
    assert objects_of(client, run) == []


# Labs whose controller was killed by SIGKILL, which no process can handle. The reaper is a child process of a
# controller that removes the lab when the controller ends in any way. Without a reaper, `testbed down` removes the lab.

CONTROLLER = """
import json, sys, time
from testbed_controller.lab.lab import Lab
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario

Lab.create(trials(Scenario.model_validate(json.loads(sys.argv[2])))[0], sys.argv[1])
time.sleep(600)
"""
"""A program that creates a lab and waits to be killed; its arguments are the run's id and the scenario as JSON."""

MOMENTS: dict[str, Callable[[docker.DockerClient, str], bool]] = {
    "state file": lambda _client, run: run in runstate.runs(),
    "network": lambda client, run: bool(objects_of(client, run)),
    "container": lambda client, run: len(objects_of(client, run)) > 1,
    # Three devices, the shaper and the control network.
    "containers": lambda client, run: len(objects_of(client, run)) == 5,
    # Without `all`, the engine lists running containers only.
    "all up": lambda client, run: (
        len(client.api.containers(filters={"label": f"{RUN}={run}"})) == 4
    ),
}
"""Moments in the creation of a lab, each with a function that returns whether a run has reached the moment."""


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    children: list[int] = []
    # Each thread has its own list.
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, path.read_text().split())
    return children


def kill_controller(
    client: docker.DockerClient, moment: str, *, kill_reaper: bool
) -> str:
    """Let a separate controller create a lab, kill it by SIGKILL at a moment, and return the id of the run."""
    run = runstate.new_id("lab-killed")
    controller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CONTROLLER,
            run,
            json.dumps(scenario_keys("lab-killed")),
        ],
        start_new_session=True,
    )
    try:
        wait_for(lambda: MOMENTS[moment](client, run), 60)
    finally:
        if kill_reaper:
            for pid in children_of(controller.pid):
                os.kill(pid, signal.SIGKILL)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    return run


@pytest.mark.parametrize("moment", MOMENTS)
def test_down_removes_lab_of_killed_controller(
    client: docker.DockerClient, moment: str
) -> None:
    run = kill_controller(client, moment, kill_reaper=True)
    # A pattern selects several runs as --all does, but spares the labs of others on this engine.
    removal = run_command("down", f"{run[:-1]}*")
    assert removal.returncode == 0, removal.stderr
    assert run in removal.stdout
    assert objects_of(client, run) == []
    assert run not in runstate.runs()


@pytest.mark.parametrize("moment", ["container", "all up"])
def test_reaper_removes_lab_of_killed_controller(
    client: docker.DockerClient, moment: str
) -> None:
    run = kill_controller(client, moment, kill_reaper=False)
    wait_for(lambda: objects_of(client, run) == [] and run not in runstate.runs(), 30)
    # A request of the killed controller, still under way, must not create a container now.
    time.sleep(0.5)
    assert objects_of(client, run) == []

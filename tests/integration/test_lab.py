"""Labs of real containers: what they are made of, how they break and mend, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


def tree(name: str) -> dict[str, Any]:
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


def trial(name: str, **network: str) -> Trial:
    given = tree(name)
    given["network"] |= network
    return trials(Scenario.model_validate(given))[0]


@pytest.fixture(scope="module", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Labs of whoever works on this machine stay out of these tests, and the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def client() -> docker.DockerClient:
    return connect()


@pytest.fixture(scope="module")
def lab(_own_state: None) -> Iterator[Lab]:
    lab = Lab.create(trial("lab-test"))
    yield lab
    lab.down()


def left_of(client: docker.DockerClient, run: str) -> list[str]:
    """Name what the engine holds of runs whose id starts so."""
    things = [
        *client.api.containers(all=True, filters={"label": RUN}),
        *client.api.networks(filters={"label": RUN}),
    ]
    return [
        str(each.get("Names") or each["Name"])
        for each in things
        if each["Labels"][RUN].startswith(run)
    ]


def fed(given: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with an input."""
    return subprocess.run(
        [TESTBED, *arguments], input=given, capture_output=True, text=True, timeout=60
    )


def inside(
    client: docker.DockerClient, lab: Lab, name: str, program: str
) -> tuple[int, str]:
    """Run Python in a device, as its own user."""
    done = client.containers.get(container_name(lab.run_id, name)).exec_run(
        ["python3", "-c", program]
    )
    return int(done.exit_code or 0), done.output.decode()


def test_a_command_runs_in_a_device_with_its_input_and_status(lab: Lab) -> None:
    given = "line\n" * 100_000
    program = "cat > /tmp/in; wc -l < /tmp/in; echo bad >&2; exit 7"
    done = fed(
        given, "exec", "-i", "--run", lab.run_id, "source", "--", "sh", "-c", program
    )
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (
        7,
        "100000",
        "bad",
    )
    unread = fed(20 * given, "exec", "-i", "--run", lab.run_id, "source", "--", "true")
    assert (unread.returncode, unread.stderr) == (0, "")


def test_devices_are_locked_down(lab: Lab, client: docker.DockerClient) -> None:
    found = client.api.inspect_container(container_name(lab.run_id, "source"))
    host = found["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["ReadonlyRootfs"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Memory"] == host["MemorySwap"] == 300 * 2**20
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert host["NetworkMode"] == "none"
    assert not host["PortBindings"]  # None, or of Docker 29 an empty object
    code, said = inside(
        client, lab, "source", "import os; print(os.getuid()); open('/opt/x', 'w')"
    )
    assert code != 0
    assert "10001\n" in said  # standard output and error come in either order
    assert "Read-only file system" in said


def test_the_shaper_has_the_engines_filter_of_system_calls_and_its_own(
    lab: Lab, client: docker.DockerClient
) -> None:
    pid = client.api.inspect_container(container_name(lab.run_id, "shaper"))["State"][
        "Pid"
    ]
    status = dict(
        line.split(":\t")
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    engine = any("seccomp" in option for option in client.info()["SecurityOptions"])
    assert int(status["Seccomp_filters"]) == 1 + engine


def test_an_idle_device_that_was_asked_takes_little_memory(lab: Lab) -> None:
    for name in lab.devices:
        agent = lab.agent(name)
        agent.health()
        agent.renew()
        assert (
            agent.metrics()["testbed_resident_bytes"] < 38e6
        )  # 19 MB before Flask is imported


def test_a_quota_is_only_set_where_the_scenario_has_one(
    lab: Lab, client: docker.DockerClient
) -> None:
    quota = {
        name: client.api.inspect_container(container_name(lab.run_id, name))[
            "HostConfig"
        ]["NanoCpus"]
        for name in lab.devices
    }
    assert quota == {"source": 0, "worker1": 500_000_000, "worker2": 500_000_000}


def test_everything_carries_the_label_of_the_run(
    lab: Lab, client: docker.DockerClient
) -> None:
    mine = {"label": f"{RUN}={lab.run_id}"}
    names = {
        each["Names"][0].lstrip("/")
        for each in client.api.containers(all=True, filters=mine)
    }
    assert names == {
        container_name(lab.run_id, name)
        for name in ("source", "worker1", "worker2", "shaper")
    }
    [network] = client.api.networks(filters=mine)
    assert network["Name"] == f"testbed-{lab.run_id}-control"
    [shaper] = client.api.inspect_network(network["Name"])["Containers"].values()
    assert shaper["Name"] == container_name(lab.run_id, "shaper")
    ports = client.api.inspect_container(shaper["Name"])["HostConfig"]["PortBindings"]
    assert [each["HostIp"] for each in ports["8700/tcp"]] == ["127.0.0.1"]


def test_devices_have_their_addresses_on_the_data_network(lab: Lab) -> None:
    assert [device.address for device in lab.devices.values()] == [
        str(lab.subnet.network_address + index) for index in (2, 3, 4)
    ]
    assert lab.broadcast == str(lab.subnet.broadcast_address)


def test_devices_meet_over_the_shaped_network_only(
    lab: Lab, client: docker.DockerClient
) -> None:
    connect_ = 'import socket; socket.create_connection(("{}", {}), timeout=1.5)'
    assert inside(
        client, lab, "source", connect_.format(lab.devices["worker1"].address, 8701)
    ) == (0, "")
    code, said = inside(
        client, lab, "source", connect_.format(lab.devices["worker1"].address, 8700)
    )
    assert code != 0
    assert "refused" in said
    assert (
        inside(
            client,
            lab,
            "source",
            "import os; print(sorted(os.listdir('/sys/class/net')))",
        )[1]
        == "['eth0', 'lo']\n"
    )


ANSWERING = """
import select, socket, sys

links, poll = {{}}, select.poll()
for address, port in {targets}:
    link = socket.socket()
    link.setblocking(False)
    link.connect_ex((address, port))
    links[link.fileno()] = link, (address, port)
    poll.register(link, select.POLLOUT)
for number, _ in poll.poll(2000):  # those that are refused have been answered, too; nobody there takes 3 s
    print(*links[number][1])
"""


def test_a_device_reaches_nothing_of_the_host_nor_of_other_runs(
    lab: Lab, client: docker.DockerClient
) -> None:
    other = Lab.create(trial("lab-other", subnet="198.19.7.0/24"))
    try:
        with socket.create_server(("0.0.0.0", 0)) as listening, IPRoute() as route:
            found = {
                str(each.get("local")) for each in route.get_addr(family=socket.AF_INET)
            }
            host = sorted(each for each in found if not each.startswith("127."))
            ports = (listening.getsockname()[1], 22, 8700)
            near = client.api.inspect_network(f"testbed-{lab.run_id}-control")[
                "Containers"
            ].values()
            far = client.api.inspect_network(f"testbed-{other.run_id}-control")[
                "Containers"
            ].values()
            targets = [
                *((address, port) for address in host for port in ports),
                *(
                    (device.address, port)
                    for device in other.devices.values()
                    for port in (8700, 8701)
                ),
                *(
                    (each["IPv4Address"].partition("/")[0], 8700)
                    for each in [*near, *far]
                ),
                (str(lab.subnet.network_address + 1), 22),
            ]
            own = {
                each.address for each in lab.devices.values()
            }  # which a control network may have as well
            targets = [each for each in targets if each[0] not in own]
            code, said = inside(
                client, lab, "source", ANSWERING.format(targets=targets)
            )
            assert (code, said) == (0, "")
            peer = [(lab.devices["worker1"].address, 8701)]
            assert inside(client, lab, "source", ANSWERING.format(targets=peer)) == (
                0,
                "{} {}\n".format(*peer[0]),
            )
        held = inside(
            client, lab, "source", "print(open('/proc/net/if_inet6').read())"
        )[1].split()
        assert set(held[5::6]) <= {"lo"}, "links hold nothing of IPv6"
    finally:
        other.down()
    lab.kill("source")
    lab.start("source")
    lab.admit("source")
    assert lab.shaper.show()["devices"]["source"]["differences"] == []
    assert inside(client, lab, "source", ANSWERING.format(targets=[(host[0], 22)])) == (
        0,
        "",
    )


def test_agents_and_shaper_want_the_token(lab: Lab) -> None:
    for url in (lab.devices["source"].control_url, lab.shaper._url):
        assert requests.get(url + "/health", timeout=5).status_code == 200
        assert requests.get(url + "/facts", timeout=5).status_code == 401
    assert lab.agent("source").facts()["device"] == "source"


def test_links_are_as_the_scenario_says_when_create_returns(lab: Lab) -> None:
    shown = lab.shaper.show()
    assert [each["differences"] for each in shown["devices"].values()] == [[], [], []]
    assert {(each["rate"], each["delay"]) for each in shown["links"]} == {(50e6, 0.005)}
    assert len(shown["links"]) == 6


def test_a_device_that_was_killed_comes_back_with_its_address_and_links(
    lab: Lab,
) -> None:
    before = lab.devices["worker1"]
    lab.kill("worker1")
    assert (lab.devices["worker1"].state, lab.devices["worker1"].pid) == ("exited", 0)
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


def test_a_device_can_be_paused_and_go_on(lab: Lab) -> None:
    for action, state in (
        (lab.pause, "paused"),
        (lab.pause, "paused"),
        (lab.resume, "running"),
        (lab.resume, "running"),
    ):
        action("worker2")
        assert lab.devices["worker2"].state == state


def test_another_process_finds_the_lab(lab: Lab) -> None:
    again = Lab.open(lab.run_id)
    assert again.devices == lab.devices
    assert (again.token, again.subnet) == (lab.token, lab.subnet)
    assert again.experiment.links == lab.experiment.links
    assert again.shaper.facts()["backend"] == lab.shaper.facts()["backend"]
    listed = json.loads(fed("", "ps", "--json").stdout)[lab.run_id]
    assert [(each["name"], each["state"]) for each in listed] == [
        (name, "running") for name in ("shaper", "source", "worker1", "worker2")
    ]
    assert {each["name"]: each["address"] for each in listed}["worker2"] == lab.devices[
        "worker2"
    ].address
    assert run_command("logs", "worker1").returncode == 0
    assert "see 'testbed ps'" in run_command("logs", "worker9").stderr


def test_an_unknown_device_or_run_is_the_users_mistake(lab: Lab) -> None:
    with pytest.raises(
        InputError, match=r"unknown device 'worker9'.*source, worker1, worker2"
    ):
        lab.kill("worker9")
    with pytest.raises(InputError, match="unknown run 'nothing'"):
        Lab.open("nothing")
    refused = run_command("down", "nothing")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "unknown run 'nothing'" in refused.stderr


def test_two_labs_of_equal_addresses_do_not_meet_and_a_vanished_container_is_a_state(
    lab: Lab, client: docker.DockerClient
) -> None:
    other = Lab.create(trial("lab-other"))
    try:
        assert other.subnet == lab.subnet
        other.kill("worker1")
        address = lab.devices["worker1"].address
        assert (
            inside(client, lab, "source", ANSWERING.format(targets=[(address, 8701)]))[
                1
            ]
            == f"{address} 8701\n"
        )
        assert inside(
            client, other, "source", ANSWERING.format(targets=[(address, 8701)])
        ) == (0, "")
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
    assert left_of(client, other.run_id) == []
    assert other.run_id not in runstate.runs()
    assert other.down()


@pytest.mark.parametrize(
    "stage",
    ["creating the network", "starting 3 devices and the shaper", "shaping the links"],
)
def test_ctrl_c_while_a_lab_is_made_leaves_nothing(
    client: docker.DockerClient, stage: str
) -> None:
    run = runstate.new_id("lab-interrupted")

    def progress(text: str) -> None:
        if text == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lab.create(trial("lab-interrupted"), run, progress=progress)
    assert left_of(client, run) == []
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
)
def test_what_no_lab_can_be_is_refused_before_anything_exists(
    client: docker.DockerClient, change: dict[str, Any], message: str
) -> None:
    run = runstate.new_id("lab-refused")
    refused = trials(Scenario.model_validate(tree("lab-refused") | change))[0]
    with pytest.raises(InputError, match=message):
        Lab.create(refused, run)
    assert left_of(client, run) == []
    assert run not in runstate.runs()


def test_a_device_that_does_not_come_up_is_reported_with_its_last_words(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runstate.new_id("lab-broken")
    whole = containers.device_settings

    def broken(
        state: RunState, image: str, spec: DeviceSpec, addresses: dict[str, str]
    ) -> dict[str, Any]:
        said = "import sys; sys.exit('no power')"
        changed = {"command": ["python3", "-c", said]} if spec.name == "worker2" else {}
        return whole(state, image, spec, addresses) | changed

    monkeypatch.setattr("testbed_controller.lab.lab.device_settings", broken)
    with pytest.raises(
        HostError,
        match="worker2 ended by itself with exit code 1; last log line: no power",
    ):
        Lab.create(trial("lab-broken"), run)
    assert left_of(client, run) == []


# SIGKILL

CONTROLLER = """
import json, sys, time
from testbed_controller.lab.lab import Lab
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario

Lab.create(trials(Scenario.model_validate(json.loads(sys.argv[2])))[0], sys.argv[1])
time.sleep(600)
"""

MOMENTS: dict[str, Callable[[docker.DockerClient, str], bool]] = {
    "state file": lambda _client, run: run in runstate.runs(),
    "network": lambda client, run: bool(left_of(client, run)),
    "container": lambda client, run: len(left_of(client, run)) > 1,
    "containers": lambda client, run: len(left_of(client, run)) == 5,
    "all up": lambda client, run: (
        len(client.api.containers(filters={"label": f"{RUN}={run}"})) == 4
    ),
}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [
        int(each)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for each in path.read_text().split()
    ]


def killed_at(client: docker.DockerClient, moment: str, guarded: bool) -> str:
    """Let a controller of its own process make a lab, and SIGKILL it at that moment; return the run's id.

    Unless it is ``guarded``, its reaper is killed with it.
    """
    run = runstate.new_id("lab-killed")
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, run, json.dumps(tree("lab-killed"))],
        start_new_session=True,
    )
    try:
        wait_for(lambda: MOMENTS[moment](client, run), 60)
    finally:
        for pid in () if guarded else children(controller.pid):
            os.kill(pid, signal.SIGKILL)
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
    return run


@pytest.mark.parametrize("moment", MOMENTS)
def test_down_clears_what_a_killed_controller_left(
    client: docker.DockerClient, moment: str
) -> None:
    run = killed_at(client, moment, guarded=False)
    # A pattern, as --all is one; this engine may hold labs of others.
    done = run_command("down", f"{run[:-1]}*")
    assert done.returncode == 0, done.stderr
    assert run in done.stdout
    assert left_of(client, run) == []
    assert run not in runstate.runs()


@pytest.mark.parametrize("moment", ["container", "all up"])
def test_a_run_whose_controller_is_killed_removes_itself(
    client: docker.DockerClient, moment: str
) -> None:
    run = killed_at(client, moment, guarded=True)
    wait_for(lambda: left_of(client, run) == [] and run not in runstate.runs(), 30)
    time.sleep(0.5)
    assert left_of(client, run) == []

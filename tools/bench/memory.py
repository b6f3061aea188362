"""Memory of a device, idle and with a torch shard, and its growth by messages."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.deployment import deployments
from testbed.ml.data import load as load_data
from testbed.ml.data.dataset import pack
from testbed.ml.preparation import workload_section
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.lab.lab import Lab
from tools.bench.measurement import Measurement
from tools.bench.transfer import exchange_scenario

MESSAGES = 10_000
"""Number of messages over which the growth is measured."""
IDLE = 38e6
"""Maximum memory of an idle device in bytes, after it has imported Flask and reported its metrics once."""
GROWTH = 5e6
"""Maximum growth by 10,000 messages of 1 kB, in bytes: noise of the allocator; a leak would be 10 MB."""
RESIDENT = "testbed_resident_bytes"
"""Metric of an agent with its resident memory in bytes."""
SETTLE_MESSAGES = 1_000
"""Messages before the first measurement, by which buffers and pools reach their size."""


def measure() -> Iterator[Measurement]:
    """Yield resident memory of a device in megabytes: idle, ready with torch, and growth by messages."""
    scenario = exchange_scenario("1kB", SETTLE_MESSAGES + MESSAGES, None)
    prepared = prepare(trials(scenario)[0])
    dataset = load_data(workload_section(prepared.scenario).data)
    lab = Lab.create(prepared.trial)
    try:
        agents = {name: lab.agent(name) for name in lab.devices}
        sink = agents["sink"]
        yield Measurement(
            "resident memory, idle device",
            sink.metrics()[RESIDENT] / 1e6,
            "MB",
            IDLE / 1e6,
        )
        addresses = {name: device.address for name, device in lab.devices.items()}
        deployed = deployments(
            prepared, lab.run_id, lab.token, addresses, lab.broadcast
        )
        for name, agent in agents.items():
            agent.deploy(deployed.of(name))
        # The coordinator alone holds samples.
        agents["source"].put_data(pack(dataset))
        yield Measurement(
            "resident memory, device with torch", sink.metrics()[RESIDENT] / 1e6, "MB"
        )
        for agent in agents.values():
            agent.start(0.0)
        before: dict[str, float] = {}
        # The events end with the program, so the loop also waits for the last message.
        for event in agents["source"].events():
            if event.event == "request" and event.fields["request"] == SETTLE_MESSAGES:
                for name, agent in agents.items():
                    before[name] = agent.metrics()[RESIDENT]
        for name, agent in agents.items():
            # Includes the events, which a device keeps until the end of the run for a controller that reconnects.
            grown = agent.metrics()[RESIDENT] - before[name]
            yield Measurement(
                f"growth over {MESSAGES} messages, {name}",
                grown / 1e6,
                "MB",
                GROWTH / 1e6,
            )
    finally:
        lab.down()

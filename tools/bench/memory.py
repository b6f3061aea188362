"""Memory: what a device takes, idle and with a torch shard, and whether messages leave any behind."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.deployment import deployments
from testbed.ml.data import load as load_data
from testbed.ml.data.dataset import pack
from testbed.ml.preparation import part_of
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.lab.lab import Lab
from tools.bench.figure import Measurement
from tools.bench.transfer import exchange_scenario

MESSAGES = 10_000
IDLE = 38e6
"""Bytes of a device that is there and was asked for its metrics, and has imported Flask."""
GROWTH = 5e6
"""Bytes that 10,000 messages of 1 kB may add: noise of the allocator, not a leak of them, which would be 10 MB."""
RESIDENT = "testbed_resident_bytes"
SETTLE_MESSAGES = 1_000
"""Sent before the first look: buffers and pools reach their size."""


def measure() -> Iterator[Measurement]:
    """Yield resident memory of a device in megabytes: idle, ready with torch, and growth by messages."""
    prepared = prepare(
        trials(exchange_scenario("1kB", SETTLE_MESSAGES + MESSAGES, None))[0]
    )
    dataset = load_data(part_of(prepared.scenario).data)
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
        addresses = {name: found.address for name, found in lab.devices.items()}
        given = deployments(prepared, lab.run_id, lab.token, addresses, lab.broadcast)
        for name, agent in agents.items():
            agent.deploy(given.of(name))
        agents["source"].put_data(pack(dataset))
        yield Measurement(
            "resident memory, device with torch", sink.metrics()[RESIDENT] / 1e6, "MB"
        )
        for agent in agents.values():
            agent.start(0.0)
        before: dict[str, float] = {}
        for event in agents["source"].events():
            if event.event == "request" and event.fields["request"] == SETTLE_MESSAGES:
                before = {
                    name: agent.metrics()[RESIDENT] for name, agent in agents.items()
                }
        for name, agent in agents.items():
            # Events are kept until they are fetched to the end of the run, so that a controller can come back.
            grown = agent.metrics()[RESIDENT] - before[name]
            yield Measurement(
                f"growth over {MESSAGES} messages, {name}",
                grown / 1e6,
                "MB",
                GROWTH / 1e6,
            )
    finally:
        lab.down()

"""Speed of the simulator in messages per second of processor time, for runs with timing only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from random import Random

from testbed.device import Device
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.simulation.world import World
from testbed.wire.message import Message


@dataclass(frozen=True)
class Throughput:
    """Result of `messages_per_second`.

    >>> Throughput(devices=2, messages=100, events=200, processor_seconds=0.5).rate
    200.0
    """

    devices: int
    messages: int
    events: int
    processor_seconds: float

    @property
    def rate(self) -> float:
        """Messages delivered and acknowledged per second of processor time, with their events recorded."""
        return self.messages / self.processor_seconds


def messages_per_second(
    devices: int = 1000, messages: int = 200_000, peers: int = 8, padding: int = 1000
) -> Throughput:
    """Measure devices that send single messages to random peers over links with random rates and delays.

    ``padding`` is the size of each message in bytes.
    """
    names = [f"device{number}" for number in range(devices)]
    # A fixed seed: revisions are compared by the same messages over the same links.
    random = Random(1)
    peers_of = {}
    for name in names:
        others = [other for other in names if other != name]
        peers_of[name] = random.sample(others, peers)
    links = {}
    for name, others in peers_of.items():
        for other in others:
            for pair in ((name, other), (other, name)):
                rate = random.uniform(1e6, 1e8)
                links[pair] = Link(rate=rate, delay=random.uniform(1e-3, 5e-2))
    messages_each = messages // devices
    finished_devices = 0
    all_finished = asyncio.Event()

    async def program(device: Device) -> None:
        nonlocal finished_devices
        own_peers = peers_of[device.name]
        listening = asyncio.create_task(listen(device))
        for number in range(messages_each):
            message = Message("bench", {"number": number}, padding=padding)
            # Waits for the acknowledgement, so a device has one message under way.
            await device.send(own_peers[number % peers], message)
        finished_devices += 1
        if finished_devices == devices:
            all_finished.set()
        # A device that has sent everything must still acknowledge the messages of others.
        await all_finished.wait()
        listening.cancel()

    async def listen(device: Device) -> None:
        while True:
            await device.receive()

    # Speed and memory do not matter: the devices compute nothing.
    specs = [DeviceSpec(name, 1e9, 1e9) for name in names]
    world = World(specs, links, program, names[0])
    began = time.process_time()
    world.start()
    world.run()
    seconds = time.process_time() - began
    world.close()
    sent = messages_each * devices
    return Throughput(devices, sent, len(world.events), seconds)

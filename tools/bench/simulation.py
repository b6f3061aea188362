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
    random = Random(1)
    chosen = {}
    for name in names:
        others = [other for other in names if other != name]
        chosen[name] = random.sample(others, peers)
    links = {}
    for name, others in chosen.items():
        for other in others:
            for pair in ((name, other), (other, name)):
                rate = random.uniform(1e6, 1e8)
                links[pair] = Link(rate=rate, delay=random.uniform(1e-3, 5e-2))
    each = messages // devices
    finished = 0
    over = asyncio.Event()

    async def program(device: Device) -> None:
        nonlocal finished
        mine = chosen[device.name]
        listening = asyncio.create_task(listen(device))
        for number in range(each):
            await device.send(
                mine[number % peers],
                Message("bench", {"number": number}, padding=padding),
            )
        finished += 1
        if finished == devices:
            over.set()
        # A device that has sent everything must still acknowledge the messages of others.
        await over.wait()
        listening.cancel()

    async def listen(device: Device) -> None:
        while True:
            await device.receive()

    world = World(
        [DeviceSpec(name, 1e9, 1e9) for name in names], links, program, names[0]
    )
    began = time.process_time()
    world.start()
    world.run()
    seconds = time.process_time() - began
    world.close()
    return Throughput(devices, each * devices, len(world.events), seconds)

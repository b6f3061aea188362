"""Test of a device that begins a round after its end, while the server still has the round's configuration."""

from itertools import permutations

from testbed.hardware import DeviceSpec
from testbed.messaging.mailbox import Mailbox
from testbed.ml.rounds.messages import KINDS, Begin, Begun, Update
from testbed.ml.rounds.rounds import STARTUP, RoundPolicy, Rounds
from testbed.network.link import Link
from testbed.simulation.world import World

NAMES = ("server", "quick", "late")
LINKS = dict.fromkeys(permutations(NAMES, 2), Link(rate=8e6, delay=0.01))


def participant(duration: float):
    """Return a program for a device whose training of a round takes ``duration`` seconds."""

    async def program(device):
        async with Mailbox(device, LINKS, KINDS) as mailbox:

            async def train(begin):
                await device.sleep(duration)
                begun = Begun(begin.configuration, incarnation=1.0, first=0, last=1)
                mailbox.post("server", begun)
                update = Update(begin.configuration, samples=1, loss=None, state={})
                mailbox.post("server", update)

            def on_begin(begin):
                mailbox.open(begin.configuration)
                mailbox.start(train(begin))

            mailbox.on(Begin, on_begin)
            await device.sleep(1000)

    return program


def test_device_beginning_after_end_of_round_is_not_served() -> None:
    served = []

    async def server(device):
        async def serve(begun):
            served.append(begun.sender)

        def invite(name, configuration):
            return Begin(configuration, round=0, state={})

        async with Mailbox(device, LINKS, KINDS) as mailbox:
            rounds = Rounds(mailbox, RoundPolicy(min_updates=1, deadline=1.0), seed=1)
            updates = await rounds.run_round(0, ["quick", "late"], invite, serve)
            assert [update.sender for update in updates] == ["quick"]
            # As long as averaging and evaluation may take: `late` begins meanwhile.
            await device.sleep(10)
            device.record("averaged")

    programs = {
        "server": server,
        "quick": participant(0.1),
        # Begins after the deadline of the first round, which is extended by `STARTUP`.
        "late": participant(STARTUP + 5.0),
    }
    devices = [DeviceSpec(name, 1e6, 1e9) for name in NAMES]
    world = World(
        devices, LINKS, lambda device: programs[device.name](device), "server", seed=1
    )
    try:
        world.start()
        world.run()
    finally:
        world.close()
    names = [event.event for event in world.events]
    assert names.count("missed") == 1
    assert names.count("averaged") == 1
    assert names.index("missed") < names.index("averaged")
    assert served == ["quick"]

"""A device that begins a round when the round is over, while the server still has the round's configuration."""

from testbed.hardware import DeviceSpec
from testbed.messaging.mailbox import Mailbox
from testbed.ml.rounds.messages import KINDS, Begin, Begun, Update
from testbed.ml.rounds.rounds import STARTUP, RoundPolicy, Rounds
from testbed.network.link import Link
from testbed.simulation.world import World

NAMES = ("server", "quick", "late")
LINKS = {
    (one, other): Link(rate=8e6, delay=0.01)
    for one in NAMES
    for other in NAMES
    if one != other
}


def test_a_late_device_is_left_out_and_nothing_else_happens() -> None:
    served = []

    async def server(device):
        async def serve(begun):
            served.append(begun.sender)

        async with Mailbox(device, LINKS, KINDS) as mailbox:
            rounds = Rounds(mailbox, RoundPolicy(min_updates=1, deadline=1.0), seed=1)
            updates = await rounds.run_round(
                0, ["quick", "late"], lambda name, number: Begin(number, 0, {}), serve
            )
            assert [update.sender for update in updates] == ["quick"]
            await device.sleep(10)  # it averages, and evaluates
            device.record("averaged")

    def participant(slow: float):
        async def program(device):
            async with Mailbox(device, LINKS, KINDS) as mailbox:

                async def train(begin):
                    await device.sleep(slow)
                    mailbox.post("server", Begun(begin.configuration, 1.0, 0, 1))
                    mailbox.post("server", Update(begin.configuration, 1, None, {}))

                def take(begin):
                    mailbox.open(begin.configuration)
                    mailbox.start(train(begin))

                mailbox.on(Begin, take)
                await device.sleep(1000)

        return program

    programs = {
        "server": server,
        "quick": participant(0.1),
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
    assert [
        event.event for event in world.events if event.event in ("missed", "averaged")
    ] == ["missed", "averaged"]
    assert served == ["quick"]

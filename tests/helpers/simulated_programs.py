"""Simulated programs in a mesh of equal links; the first device is the coordinator."""

from itertools import permutations

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.simulation.faults import FaultExecution
from testbed.simulation.world import World

LINK = Link(rate=8e6, delay=0.01)
"""8 Mbit/s, which is a megabyte per second."""


def simulate_programs(programs, link=LINK, faults=(), speed=1e6):
    """Run programs until the first one returns, and return the world.

    ``programs`` maps the name of each device to an async function of the device.
    """
    links = dict.fromkeys(permutations(programs, 2), link)
    specs = [DeviceSpec(name, speed, 1e9) for name in programs]
    script = FaultScript([FaultPart.model_validate(fault) for fault in faults])
    world = World(
        specs,
        links,
        lambda device: programs[device.name](device),
        next(iter(programs)),
        seed=1,
    )
    world.start()
    FaultExecution(world, script).start()
    try:
        world.run()
    except Exception as failure:
        # The world wraps errors of programs; tests expect the errors themselves.
        if failure.__cause__ is not None:
            raise failure.__cause__ from None
        raise
    finally:
        world.close()
    return world

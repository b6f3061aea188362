"""Programs on the virtual clock: a mesh of equal links, the first device leads."""

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.simulation.faults import FaultExecution
from testbed.simulation.world import World

LINK = Link(rate=8e6, delay=0.01)
"""A megabyte a second."""


def simulate_programs(programs, link=LINK, faults=(), speed=1e6):
    """Run programs (device name -> async function of the device) until the first one returns; return the world."""
    links = {
        (one, other): link for one in programs for other in programs if one != other
    }
    specs = [DeviceSpec(name, speed, 1e9) for name in programs]
    world = World(
        specs,
        links,
        lambda device: programs[device.name](device),
        next(iter(programs)),
        seed=1,
    )
    world.start()
    FaultExecution(
        world, FaultScript([FaultPart.model_validate(fault) for fault in faults])
    ).start()
    try:
        world.run()
    except Exception as failure:
        if failure.__cause__ is not None:
            raise failure.__cause__ from None
        raise
    finally:
        world.close()
    return world

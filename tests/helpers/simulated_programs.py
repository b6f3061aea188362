"""Simulated programs in a mesh of equal links; the first device is the coordinator."""

from tests.helpers.worlds import make_world


def simulate_programs(programs, **options):
    """Run programs until the first one returns, and return the world.

    ``programs`` maps the name of each device to an async function of the device; ``options`` are those of
    `make_world`. Raises the error of a failed program.
    """
    world = make_world(programs, **options)
    try:
        world.run()
    except Exception as failure:
        # The world wraps errors of programs; tests expect the errors themselves.
        if failure.__cause__ is not None:
            raise failure.__cause__ from None
        raise
    return world

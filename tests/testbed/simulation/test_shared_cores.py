"""Devices that share the cores of one machine, against times computed by hand."""

import pytest

from testbed.common.errors import InputError
from testbed.device import Cost, Device, Span
from testbed.hardware import Machine
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import validate
from testbed.scenario.schema import Source
from tests.helpers.worlds import make_world
from tests.testbed.simulation.observations import values_of

ONE_CORE = (Machine(("a", "b"), cores=1),)


def compute_sequence(*flops):
    """Make a program of consecutive computations; 1e6 FLOPs take a second alone."""

    async def program(device: Device):
        for cost in flops:
            await device.compute(lambda: None, Cost(cost), Span("forward"))
        await device.sleep(20)

    return program


def simulate_durations(machines, programs, **options):
    """Run the programs and return the durations of the computations of each device."""
    world = make_world(programs, machines=machines, **options)
    world.run()
    return {
        name: values_of(world, "compute", "duration", device=name) for name in programs
    }


def test_two_devices_share_core_equally_until_one_finishes():
    durations = simulate_durations(
        ONE_CORE, {"a": compute_sequence(2e6, 1e6), "b": compute_sequence(1e6)}
    )
    # Until 2 s, b does its 1 s of work and a one of its 2 s.
    assert durations["a"] == [pytest.approx(3), pytest.approx(1)]
    assert durations["b"] == [pytest.approx(2)]


def test_three_devices_share_two_cores_and_other_machine_is_unaffected():
    durations = simulate_durations(
        (Machine(("a", "b", "c"), cores=2),),
        dict.fromkeys("abcd", compute_sequence(2e6)),
    )
    # Two thirds of a core each: 2 s of work take 3 s; d has a machine to itself.
    first = [durations[name][0] for name in "abcd"]
    assert first == pytest.approx([3, 3, 3, 2])


@pytest.mark.parametrize(
    ("fault", "expected_a", "expected_b"),
    [
        # After 1 s both have done 0.5 s of their 2 s of work.
        pytest.param({"kill": "b", "at": "1s"}, [2.5], [], id="kill"),
        pytest.param(
            {"pause": "b", "at": "1s", "for": "10s"}, [2.5], [12.5], id="pause"
        ),
        # Then 1.5 s of a and 3 s of b are left: 3 s shared, and 1.5 s of b alone.
        pytest.param(
            {"throttle": {"device": "b", "slowdown": 2}, "at": "1s"},
            [4],
            [5.5],
            id="throttle",
        ),
    ],
)
def test_fault_of_one_device_changes_shares_of_core(fault, expected_a, expected_b):
    durations = simulate_durations(
        ONE_CORE,
        {"a": compute_sequence(2e6), "b": compute_sequence(2e6)},
        faults=[fault],
    )
    assert durations["a"] == pytest.approx(expected_a)
    assert durations["b"] == pytest.approx(expected_b)


def scenario_with_machines(machines):
    return validate(
        {
            "name": "shared",
            "devices": {
                "one": {"speed": "1gflops"},
                "two": {"speed": "1gflops"},
                "far": {"speed": "1gflops"},
            },
            "machines": machines,
            "workload": {
                "task": "train",
                "model": {"name": "mlp"},
                "data": {"name": "digits"},
                "method": {"name": "ftpipehd"},
                "batch_size": 32,
                "steps": 2,
            },
        },
        Source("shared.yaml"),
    )


def test_planning_problem_uses_speed_with_all_devices_of_machine_busy():
    scenario = scenario_with_machines([{"devices": ["one", "two"], "cores": 1}])
    (trial,) = trials(scenario)
    speeds = {device.name: device.speed for device in prepare(trial).problem.devices}
    assert speeds == {"one": 0.5e9, "two": 0.5e9, "far": 1e9}
    # The experiment keeps the speeds of the scenario: the simulation itself shares the cores.
    assert {device.speed for device in trial.experiment.devices} == {1e9}


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        pytest.param(
            [{"devices": ["one", "tow"], "cores": 1}],
            "unknown device 'tow'",
            id="unknown-device",
        ),
        pytest.param(
            [{"devices": ["one", "two"], "cores": 1}, {"cores": 2}],
            "'one' is already placed on another machine",
            id="device-on-two-machines",
        ),
    ],
)
def test_invalid_machines_are_rejected(machines, message):
    with pytest.raises(InputError, match=message):
        trials(scenario_with_machines(machines))

"""Devices that share the cores of one computer, against times computed by hand."""

import pytest

from testbed.common.errors import InputError
from testbed.device import Cost, Device, Span
from testbed.hardware import Machine
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import validate
from testbed.scenario.schema import Source
from tests.helpers.worlds import events_of, make_world

ONE_CORE = (Machine(("a", "b"), 1),)


def computing(*flops):
    async def program(device: Device):
        for each in flops:
            await device.compute(lambda: None, Cost(each), Span("forward"))
        await device.sleep(20)

    return program


def durations(machines, programs, **options):
    run = make_world(programs, machines=machines, **options)
    run.run()
    return {
        name: [event["duration"] for event in events_of(run, "compute", name)]
        for name in programs
    }


def test_two_devices_of_one_core_have_half_of_it_until_one_is_done():
    found = durations(ONE_CORE, {"a": computing(2e6, 1e6), "b": computing(1e6)})
    assert found == {"a": [pytest.approx(3), pytest.approx(1)], "b": [pytest.approx(2)]}


def test_a_device_takes_one_core_at_most_and_others_are_not_concerned():
    found = durations(
        (Machine(("a", "b", "c"), 2),), {name: computing(2e6) for name in "abcd"}
    )
    assert [found[name][0] for name in "abcd"] == pytest.approx([3, 3, 3, 2])


@pytest.mark.parametrize(
    ("fault", "a", "b"),
    [
        (
            {"kill": "b", "at": "1s"},
            2.5,
            None,
        ),  # b has done 0.5 s of its work, and so has a
        ({"pause": "b", "at": "1s", "for": "10s"}, 2.5, 12.5),
        (
            {"throttle": {"device": "b", "slowdown": 2}, "at": "1s"},
            4,
            5.5,
        ),  # 1.5 s of a and 3 of b are left then
    ],
)
def test_fault_of_one_device_frees_the_shared_cores(fault, a, b):
    found = durations(
        ONE_CORE, {"a": computing(2e6), "b": computing(2e6)}, faults=[fault]
    )
    assert found["a"] == [pytest.approx(a)]
    assert found["b"] == ([] if b is None else [pytest.approx(b)])


def scenario(machines):
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


def test_plans_go_by_the_speed_while_all_on_a_machine_compute():
    (trial,) = trials(scenario([{"devices": ["one", "two"], "cores": 1}]))
    speeds = {device.name: device.speed for device in prepare(trial).problem.devices}
    assert speeds == {"one": 0.5e9, "two": 0.5e9, "far": 1e9}
    assert {device.speed for device in trial.experiment.devices} == {1e9}


@pytest.mark.parametrize(
    ("machines", "text"),
    [
        ([{"devices": ["one", "tow"], "cores": 1}], "unknown device 'tow'"),
        (
            [{"devices": ["one", "two"], "cores": 1}, {"cores": 2}],
            "'one' is on another machine already",
        ),
    ],
)
def test_machines_that_cannot_be_are_refused(machines, text):
    with pytest.raises(InputError, match=text):
        trials(scenario(machines))

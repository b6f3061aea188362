"""Execution of an experiment on the virtual clock, in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from testbed.common.errors import InputError, TestbedError
from testbed.common.memory import keep_freed_memory
from testbed.common.usercode import describe_error
from testbed.experiment import Experiment
from testbed.faults.script import FaultScript, LinkTraceScript
from testbed.simulation.device import SimulatedDevice
from testbed.simulation.event_queue import EmptySchedule, TimeLimit
from testbed.simulation.faults import FaultExecution, LinkTraceExecution
from testbed.simulation.host import Guest
from testbed.simulation.recorder import Recorder
from testbed.simulation.world import CoordinatorGoneError, ProgramError, World
from testbed.trace.events import Event
from testbed.trace.outcome import UNGATHERED, Outcome, Status, ended
from testbed.wire import arrays
from testbed.workload import Prepared


def simulate(
    prepared: Prepared,
    data: Any,
    on_event: Callable[[Event], None] | None = None,
    weights: Mapping[str, Any] | None = None,
    *,
    names: Collection[str] | None = None,
    on_lines: Callable[[str], None] | None = None,
) -> Outcome:
    """Run the method's programs with real computation and charged time; return the outcome.

    ``data`` is the result of `testbed.workload.Workload.load`.

    The run ends when the program of the coordinator returns. The run fails when any program raises or all programs wait
    for each other, is interrupted by Ctrl-C, and times out at the scenario's ``time_limit`` (virtual seconds).
    ``on_event`` receives events as they happen, all or only events of some ``names``; ``on_lines`` receives all events
    as lines of a file, many at a time. Two calls with equal arguments give equal events.
    """
    refusal = prepared.scenario.workload.why_not_simulated
    if refusal is not None:
        raise InputError(refusal)
    experiment, plan = prepared.experiment, prepared.plan
    method, problem = prepared.method, prepared.problem
    work = prepared.workload
    work.begin(problem.workload)
    inputs = work.inputs(prepared, data, weights)
    # `Outcome.weights` has arrays of this library; messages are not encoded on this clock.
    arrays.choose(work.arrays)
    shared = method.simulation_state(problem)

    def program(device: SimulatedDevice) -> Coroutine[Any, Any, None]:
        # The same facts as in a container, so that a program that runs here runs there too.
        own_problem, own_plan = method.facts(problem, plan, device.name)
        context = inputs.program_context(
            device.name,
            own_problem,
            own_plan,
            lambda: device.record("weights"),
            shared,
        )
        return method.program(device, context)

    recorder = Recorder(on_event, names)
    if on_lines is not None:
        recorder.events.follow(on_lines)
    world = World(
        experiment.devices,
        experiment.links,
        program,
        plan.coordinator,
        cells=experiment.cells,
        machines=experiment.machines,
        radio=experiment.radio,
        seed=problem.seed,
        time_limit=experiment.time_limit,
        recorder=recorder,
    )
    keep_freed_memory()
    start = time.perf_counter()
    try:
        with work.simulation_context(problem):
            status, error = ended(
                *_run_world(world, experiment),
                world.events,
                weights_given=inputs.begins_with_weights,
            )
            final_weights = None
            parts: dict[str, bytes] = {}
            # Before `World.close`, which ends the programs that expose the weights.
            if problem.workload.is_computed:
                final_weights = _exposed_weights(world.hosts[plan.coordinator].device)
                if final_weights is not None:
                    final_weights = inputs.complete(final_weights)
                if status in UNGATHERED:
                    parts = _exposed_parts(world)
    finally:
        world.close()
    versions = work.library_versions()
    return Outcome(
        runtime="simulate",
        status=status,
        events=world.events,
        error=error,
        host={"computing": [] if versions is None else [versions]},
        weights_file=final_weights,
        parts=parts,
        wall_seconds=time.perf_counter() - start,
    )


def _run_world(world: World, experiment: Experiment) -> tuple[Status, str | None]:
    try:
        # Before the devices: changes at 0 s are the state in which they start.
        LinkTraceExecution(world, LinkTraceScript(experiment.changes)).start()
        faults = FaultExecution(world, FaultScript(experiment.faults))
        world.start()
        faults.start()
        world.run()
    except ProgramError as failure:
        return "failed", f"{failure}: {_error_message(failure.__cause__)}"
    except CoordinatorGoneError as gone:
        return "failed", str(gone)
    except KeyboardInterrupt:
        return "interrupted", "stopped by the user"
    except EmptySchedule:
        reason = world.describe_missing_coordinator()
        return "failed", reason or f"deadlock: {world.describe_waits()}"
    except TimeLimit:
        limit = f"not over after {experiment.time_limit:g} s"
        return "timed out", f"{limit}; {world.describe_waits()}"
    return "finished", None


def _exposed_weights(device: Guest | None, *, part: bool = False) -> bytes | None:
    """Return the weights exposed by a device as safetensors, or only the device's ``part``; None if unavailable."""
    if device is None or part not in device.exposed:
        return None
    weights = device.exposed[part]()
    return arrays.pack(weights) if weights else None


def _exposed_parts(world: World) -> dict[str, bytes]:
    parts = {}
    for name, host in world.hosts.items():
        weights = _exposed_weights(host.device, part=True)
        if weights is not None:
            parts[name] = weights
    return parts


def _error_message(error: BaseException | None) -> str:
    """Return an error as text: a line, the traceback through files of the user, or the full traceback."""
    if error is None or isinstance(error, TestbedError):
        return str(error)
    return describe_error(error) or "".join(traceback.format_exception(error))

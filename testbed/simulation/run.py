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
from testbed.faults.script import FaultScript, TraceScript
from testbed.simulation.calendar import Stillness, TimeLimit
from testbed.simulation.device import SimulatedDevice
from testbed.simulation.faults import FaultExecution, TraceExecution
from testbed.simulation.host import Guest
from testbed.simulation.recorder import Recorder
from testbed.simulation.world import LeadGoneError, ProgramError, World
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

    ``data`` is what the kind of work has loaded (`testbed.workload.Workload.load`).

    Ends when the program of the plan's lead returns, fails when any program raises or when all wait for each
    other, is interrupted by Ctrl-C, and times out at the scenario's ``time_limit`` (virtual seconds).
    ``on_event`` sees events as they happen, all or those of some ``names``; ``on_lines`` has all as lines of a file,
    many at a time. Two calls with equal arguments give equal events.
    """
    if (why := prepared.scenario.workload.why_not_simulated) is not None:
        raise InputError(why)
    experiment, method, problem, plan = (
        prepared.experiment,
        prepared.method,
        prepared.problem,
        prepared.plan,
    )
    work = prepared.workload
    work.begin(problem.workload)
    inputs = work.inputs(prepared, data, weights)
    arrays.choose(work.arrays)
    shared = method.simulation_state(problem)

    def program(device: SimulatedDevice) -> Coroutine[Any, Any, None]:
        posed, own_plan = method.facts(problem, plan, device.name)
        return method.program(
            device,
            inputs.job(
                device.name, posed, own_plan, lambda: device.record("weights"), shared
            ),
        )

    recorder = Recorder(on_event, names)
    if on_lines is not None:
        recorder.events.follow(on_lines)
    world = World(
        experiment.devices,
        experiment.links,
        program,
        plan.lead,
        cells=experiment.cells,
        machines=experiment.machines,
        radio=experiment.radio,
        seed=problem.seed,
        time_limit=experiment.time_limit,
        recorder=recorder,
    )
    keep_freed_memory()
    began = time.perf_counter()
    try:
        with work.simulation_context(problem):
            given = inputs.begins_with_weights
            status, error = ended(
                *_run_world(world, experiment), world.events, weights_given=given
            )
            computed = problem.workload.is_computed
            final = (
                _exposed_weights(world.hosts[plan.lead].device) if computed else None
            )
            final = final and inputs.complete(final)
            parts = _exposed_parts(world) if computed and status in UNGATHERED else {}
    finally:
        world.close()
    versions = work.library_versions()
    return Outcome(
        runtime="simulate",
        status=status,
        events=world.events,
        error=error,
        host={"computing": [] if versions is None else [versions]},
        weights_file=final,
        parts=parts,
        wall_seconds=time.perf_counter() - began,
    )


def _run_world(world: World, experiment: Experiment) -> tuple[Status, str | None]:
    """Run a world with faults and trace; return its end status and the error message."""
    try:
        TraceExecution(world, TraceScript(experiment.changes)).start()
        faults = FaultExecution(world, FaultScript(experiment.faults))
        world.start()
        faults.start()
        world.run()
    except ProgramError as failure:
        return "failed", f"{failure}: {_error_message(failure.__cause__)}"
    except LeadGoneError as gone:
        return "failed", str(gone)
    except KeyboardInterrupt:
        return "interrupted", "stopped by the user"
    except Stillness:
        return "failed", world.why_ended() or "deadlock: " + world.why_still()
    except TimeLimit:
        return (
            "timed out",
            f"not over after {experiment.time_limit:g} s; " + world.why_still(),
        )
    return "finished", None


def _exposed_weights(device: Guest | None, part: bool = False) -> bytes | None:
    """Return the weights exposed by a device as safetensors; None if unavailable."""
    weights = (
        device.exposed[part]()
        if device is not None and part in device.exposed
        else None
    )
    return arrays.pack(weights) if weights else None


def _exposed_parts(world: World) -> dict[str, bytes]:
    parts = {
        name: _exposed_weights(host.device, part=True)
        for name, host in world.hosts.items()
    }
    return {name: weights for name, weights in parts.items() if weights is not None}


def _error_message(error: BaseException | None) -> str:
    """Return the error for the user: one line, the lines of their own files, or the full traceback."""
    if error is None or isinstance(error, TestbedError):
        return str(error)
    return describe_error(error) or "".join(traceback.format_exception(error))

"""Run an experiment on the virtual clock, in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError, TestbedError
from testbed.common.memory import keep_freed_memory
from testbed.common.seeds import derive
from testbed.common.usercode import located
from testbed.deployment import complete, frozen_part, with_frozen
from testbed.experiment import Experiment
from testbed.faults.script import FaultScript, TraceScript
from testbed.method import Job
from testbed.ml import kernels
from testbed.prepare import Prepared
from testbed.simulation.calendar import Stillness, TimeLimit
from testbed.simulation.device import SimulatedDevice
from testbed.simulation.faults import FaultExecution, TraceExecution
from testbed.simulation.host import Guest
from testbed.simulation.recorder import Recorder
from testbed.simulation.world import LeadGoneError, ProgramError, World
from testbed.trace.events import Event
from testbed.trace.outcome import UNGATHERED, Outcome, Status, ended
from testbed.wire import arrays

if TYPE_CHECKING:
    import torch

    from testbed.ml.data.dataset import Dataset


def simulate(
    prepared: Prepared,
    dataset: Dataset | None,
    on_event: Callable[[Event], None] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    names: Collection[str] | None = None,
    on_lines: Callable[[str], None] | None = None,
) -> Outcome:
    """Run the method's programs with real torch work and charged time; return what happened.

    Ends when the program of the plan's lead returns, fails when any program raises or when all wait for each
    other, is interrupted by Ctrl-C, and times out at the scenario's ``time_limit`` (virtual seconds).
    ``on_event`` sees events as they happen, all or those of some ``names``; ``on_lines`` has all as lines of a file,
    many at a time. Two calls with equal arguments give equal events.
    """
    reproducible = prepared.scenario.workload.reproducible
    if reproducible:
        kernels.fix()  # before the import, which reads the variables
    import torch

    if prepared.scenario.workload.task == "program":
        raise InputError("programs run in containers alone: leave '--runtime simulate' out")
    experiment, method, problem, plan = prepared.experiment, prepared.method, prepared.problem, prepared.plan

    frozen = frozen_part(problem, weights)
    shared = method.simulation_state(problem)

    def program(device: SimulatedDevice) -> Coroutine[Any, Any, None]:
        lead = device.name == plan.lead
        posed, own_plan = method.facts(problem, plan, device.name)
        own = None if dataset is None else prepared.share(dataset, device.name)
        given = None
        if lead and weights is not None:
            given = {name: tensor for name, tensor in weights.items() if name not in frozen}
        posed = with_frozen(posed, frozen)
        return method.program(device, Job(posed, own_plan, own, given, lambda: device.record("weights"), shared))

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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), kernels.chosen(reproducible):
            torch.manual_seed(derive(problem.seed, "torch"))
            status, error = ended(*_run(world, experiment), world.events, weights_given=weights is not None)
            computed = problem.workload.numerics != "none"
            final = _weights(world.hosts[plan.lead].device) if computed else None
            final = final and complete(problem, final, weights)
            parts = _parts(world) if computed and status in UNGATHERED else {}
    finally:
        torch.set_num_threads(threads)
        world.close()
    return Outcome(
        runtime="simulate",
        status=status,
        events=world.events,
        error=error,
        host={"computing": [kernels.computing()]},
        weights_file=final,
        parts=parts,
        wall_seconds=time.perf_counter() - began,
    )


def _run(world: World, experiment: Experiment) -> tuple[Status, str | None]:
    """Run a world with its faults and its trace to the end; return how it ended, and why if not as it should."""
    try:
        TraceExecution(world, TraceScript(experiment.changes)).start()
        faults = FaultExecution(world, FaultScript(experiment.faults))
        world.start()
        faults.start()
        world.run()
    except ProgramError as failure:
        return "failed", f"{failure}: {_message(failure.__cause__)}"
    except LeadGoneError as gone:
        return "failed", str(gone)
    except KeyboardInterrupt:
        return "interrupted", "stopped by the user"
    except Stillness:
        return "failed", world.why_ended() or "deadlock: " + world.why_still()
    except TimeLimit:
        return "timed out", f"not over after {experiment.time_limit:g} s; " + world.why_still()
    return "finished", None


def _weights(device: Guest | None, part: bool = False) -> bytes | None:
    """Return what a device exposes, as safetensors; None where it is down or exposes nothing."""
    found = device.exposed[part]() if device is not None and part in device.exposed else None
    return arrays.pack(found) if found else None


def _parts(world: World) -> dict[str, bytes]:
    found = {name: _weights(host.device, part=True) for name, host in world.hosts.items()}
    return {name: weights for name, weights in found.items() if weights is not None}


def _message(error: BaseException | None) -> str:
    """Return what the user should read: one line, the lines of their own files, or all of the traceback."""
    if error is None or isinstance(error, TestbedError):
        return str(error)
    return located(error) or "".join(traceback.format_exception(error))

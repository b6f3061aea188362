"""Run an experiment on the virtual clock, in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal

from testbed.errors import TestbedError
from testbed.faults.replay import TraceScript
from testbed.faults.script import FaultScript
from testbed.methods.base import Job
from testbed.prepare import Prepared
from testbed.seeds import derive
from testbed.simulation.device import SimulatedDevice
from testbed.simulation.faults import FaultExecution, TraceExecution
from testbed.simulation.loop import Stillness, TimeLimit
from testbed.simulation.world import ProgramError, World
from testbed.trace.events import Event
from testbed.trace.outcome import Outcome

if TYPE_CHECKING:
    import torch

    from testbed.data.dataset import Dataset


def simulate(
    prepared: Prepared,
    dataset: Dataset | None,
    on_event: Callable[[Event], None] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Outcome:
    """Run the method's programs with real torch work and charged time; return what happened.

    Ends when the program of the plan's lead returns, fails when any program raises or when all wait for each
    other, and times out at the scenario's ``time_limit`` (virtual seconds). ``on_event`` sees events as they
    happen. Two calls with equal arguments give equal events.
    """
    import torch

    experiment, method, problem, plan = prepared.experiment, prepared.method, prepared.problem, prepared.plan

    def program(device: SimulatedDevice) -> Coroutine[Any, Any, None]:
        lead = device.name == plan.lead
        own = None if dataset is None else prepared.share(dataset, device.name)
        return method.program(device, Job(problem, plan, own, weights if lead else None))

    limit = experiment.time_limit
    world = World(
        experiment.devices,
        experiment.links,
        program,
        plan.lead,
        cells=experiment.cells,
        seed=problem.seed,
        time_limit=limit,
        on_event=on_event,
    )
    faults = FaultExecution(world, FaultScript(experiment.faults))
    status: Literal["finished", "failed", "timed out"] = "finished"
    error = None
    final = None
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(problem.seed, "torch"))
            try:
                TraceExecution(world, TraceScript(experiment.changes)).start()
                world.start()
                faults.start()
                world.run()
            except ProgramError as failure:
                status, error = "failed", f"{failure}: {_told(failure.__cause__)}"
            except Stillness:
                status, error = "failed", "deadlock: " + world.why_still()
            except TimeLimit:
                status, error = "timed out", f"not over after {limit:g} s; " + world.why_still()
            device = world.hosts[plan.lead].device
            if device is not None and device.exposed is not None:
                final = {name: tensor.detach().clone() for name, tensor in device.exposed().items()}
    finally:
        torch.set_num_threads(threads)
        world.close()
    return Outcome(
        runtime="simulate",
        status=status,
        events=world.events,
        error=error,
        weights=final,
        wall_seconds=time.perf_counter() - began,
    )


def _told(error: BaseException | None) -> str:
    """Return what the user should read: one line of an error that is meant for him, all there is of any other."""
    return str(error) if isinstance(error, TestbedError) else "".join(traceback.format_exception(error))

"""A stage of torch's own pipelining over gloo. `tools.bench.gloo` runs this file, which needs only torch, per device.

The argument is a JSON object: ``rank`` and ``world`` (number of stages, one per device), ``schedule`` (``1f1b`` or
``gpipe``), ``widths`` (values between fully connected layers, from the input to the classes), ``start`` and ``stop``
(the layers of this stage, as in `range`), ``batch`` (samples per step), ``micro_batches`` and ``steps``. The output is
a JSON object: ``seconds`` of each step, from its beginning to the end of the update on this device, and ``processor``,
the processor time of all steps in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

MESSAGE_TIMEOUT = timedelta(seconds=60)
"""Maximum time to wait for a message of another stage."""


def make_layers(widths: list[int], start: int, stop: int) -> nn.Sequential:
    """Return the fully connected layers ``start`` to ``stop - 1``; layer i has widths[i] inputs.

    A ReLU follows each layer except the last one of the whole model.
    """
    modules: list[nn.Module] = []
    for index in range(start, stop):
        modules.append(nn.Linear(widths[index], widths[index + 1]))
        if index < len(widths) - 2:
            modules.append(nn.ReLU())
    return nn.Sequential(*modules)


def train_stage(job: dict[str, Any]) -> dict[str, Any]:
    """Train one stage in the existing process group; return the measured times."""
    # The import takes more than a second, which tests and the bench itself can do without.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world, widths = job["rank"], job["world"], job["widths"]
    model = make_layers(widths, job["start"], job["stop"])
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedules = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    schedule = schedules[job["schedule"]](
        stage, job["micro_batches"], loss_fn=nn.functional.cross_entropy
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(job["batch"], widths[0])
    labels = torch.randint(widths[-1], (job["batch"],))
    seconds: list[float] = []
    processor_time_before = time.process_time()
    for _ in range(job["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad()
        # Only the first stage has samples, and only the last one labels.
        inputs = (samples,) if rank == 0 else ()
        target = labels if rank == world - 1 else None
        schedule.step(*inputs, target=target, return_outputs=False)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    processor_time = time.process_time() - processor_time_before
    return {"seconds": seconds, "processor": processor_time}


def main() -> None:
    """Train as described by the argument and print the times; MASTER_ADDR and MASTER_PORT locate the first stage."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", rank=job["rank"], world_size=job["world"], timeout=MESSAGE_TIMEOUT
    )
    times = train_stage(job)
    # No stage ends while another one still uses the connection to it.
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps(times))


if __name__ == "__main__":
    main()

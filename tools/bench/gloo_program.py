"""A stage of torch's own pipelining over gloo, alone with torch: `tools.bench.gloo` runs this file on each device.

Its one argument is a JSON object: ``rank`` and ``world`` (stages, one a device), ``schedule`` (``1f1b`` or ``gpipe``),
``widths`` (values between fully connected layers, from the input to the classes), ``first`` and ``last`` (of the
layers: this stage's, up to but without the last), ``batch`` samples a step in ``micro_batches``, ``steps``. It prints
a JSON object: ``seconds`` of each step, from its beginning to the end of the update on this device, and ``processor``,
the seconds of processor time that the steps took together.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

PATIENCE = timedelta(seconds=60)
"""How long a message of another stage is waited for."""


def layers(widths: list[int], first: int, last: int) -> nn.Sequential:
    """Return fully connected layers ``first`` up to but without ``last``: from widths[i] to widths[i + 1] values.

    All but the last of the whole model are followed by a ReLU.
    """
    made: list[nn.Module] = []
    for index in range(first, last):
        made.append(nn.Linear(widths[index], widths[index + 1]))
        if index < len(widths) - 2:
            made.append(nn.ReLU())
    return nn.Sequential(*made)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return what the steps of this stage took; the process group is there."""
    # Takes more than a second, which the bench itself and what tests it do without.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world, widths = job["rank"], job["world"], job["widths"]
    model = layers(widths, job["first"], job["last"])
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    chosen = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[job["schedule"]]
    schedule = chosen(stage, job["micro_batches"], loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(job["batch"], widths[0])
    labels = torch.randint(widths[-1], (job["batch"],))
    seconds: list[float] = []
    busy = time.process_time()
    for _ in range(job["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad()
        inputs = (samples,) if rank == 0 else ()
        schedule.step(
            *inputs, target=labels if rank == world - 1 else None, return_outputs=False
        )
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "processor": time.process_time() - busy}


def main() -> None:
    """Train as the argument says and print what it took; the environment says where the first stage is."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", rank=job["rank"], world_size=job["world"], timeout=PATIENCE
    )
    took = train(job)
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps(took))


if __name__ == "__main__":
    main()

"""Torch's own pipelining over gloo: nothing here knows the testbed; a line of JSON with an "event" becomes one."""

import json
import os
import time

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = RANK == WORLD - 1
BATCH, WIDTH, CLASSES, STEPS = 64, 64, 10, 20

distributed.init_process_group("gloo")
torch.manual_seed(RANK)
stage = PipelineStage(
    nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES if LAST else WIDTH)
    ),
    RANK,
    WORLD,
    torch.device("cpu"),
)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
samples, labels = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))

for step in range(STEPS):
    began, losses = time.perf_counter(), []
    optimizer.zero_grad()
    schedule.step(
        *([samples] if RANK == 0 else []),
        target=labels if LAST else None,
        losses=losses,
    )
    optimizer.step()
    if LAST:
        loss = sum(float(each) for each in losses) / len(losses)
        print(
            json.dumps({"event": "step", "step": step, "loss": loss, "samples": BATCH}),
            flush=True,
        )
    if RANK == 0:
        print(f"step {step}: {time.perf_counter() - began:.4f} s", flush=True)

distributed.destroy_process_group()

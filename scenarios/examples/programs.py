"""Torch's own pipelining over gloo, without imports from the testbed; a printed line of JSON becomes an event."""

import json
import os
import time

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
IS_FIRST = RANK == 0
IS_LAST = RANK == WORLD - 1
BATCH = 64
WIDTH = 64
CLASSES = 10
STEPS = 20

distributed.init_process_group("gloo")
torch.manual_seed(RANK)
module = nn.Sequential(
    nn.Linear(WIDTH, WIDTH),
    nn.ReLU(),
    nn.Linear(WIDTH, CLASSES if IS_LAST else WIDTH),
)
stage = PipelineStage(module, RANK, WORLD, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
samples = torch.randn(BATCH, WIDTH)
labels = torch.randint(CLASSES, (BATCH,))
# Only the first stage has inputs, only the last has labels; the others receive activations and gradients.
inputs = [samples] if IS_FIRST else []
target = labels if IS_LAST else None

for step in range(STEPS):
    began = time.perf_counter()
    losses = []
    optimizer.zero_grad()
    schedule.step(*inputs, target=target, losses=losses)
    optimizer.step()
    if IS_LAST:
        # One loss for each micro-batch.
        loss = sum(float(part) for part in losses) / len(losses)
        event = {"event": "step", "step": step, "loss": loss, "samples": BATCH}
        print(json.dumps(event), flush=True)
    if IS_FIRST:
        print(f"step {step}: {time.perf_counter() - began:.4f} s", flush=True)

distributed.destroy_process_group()

"""What becomes of the outputs of an inference workload: boxes of objects, or a score where there are labels."""

from __future__ import annotations

from testbed.common.lazy import torch
from testbed.device import Device
from testbed.kits.layers.feed import Requests
from testbed.kits.layers.score import Score
from testbed.method import Problem


class Answers:
    """Takes in the output of every request and records what it says, on the device that asked."""

    def __init__(self, device: Device, problem: Problem, requests: Requests) -> None:
        self._device = device
        self._detector = problem.model.detector
        self._requests = requests
        self._score = Score(problem.training)

    def add(self, index: int, outputs: torch.Tensor) -> None:
        """Take in the outputs (samples, ...) of one request; its time is over by then."""
        if outputs.is_meta:
            return
        if self._detector is not None:
            for sample, output in zip(self._requests.samples(index), outputs, strict=True):
                boxes = [box.to_json() for box in self._detector.boxes(output.numpy())]
                self._device.record("objects", request=index, sample=sample, boxes=boxes)
        elif self._requests.labelled:
            self._score.add(outputs, self._requests.labels(index))

    def finish(self) -> None:
        """Record the score of all requests, if there is one."""
        if self._requests.labelled:
            self._device.record("evaluate", step=len(self._requests), **self._score.fields())

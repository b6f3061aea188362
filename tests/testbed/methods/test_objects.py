"""Objects found in pictures: the same boxes from every method, told in figures, files and reports."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from testbed.scenario.expand import trials
from testbed_controller.report.boxes import draw
from testbed_controller.report.boxes import write as write_pictures
from testbed_controller.report.html import render
from testbed_controller.report.terminal import show
from testbed_controller.results import files
from tests.helpers import recorded
from tests.helpers.runs import fields_of, make_scenario, problem_of, run_simulated

WORK = {
    "task": "infer",
    "requests": 3,
    "model": {"name": "yolov2"},
    "data": {"name": "photos-64x96"},
    "batch_size": 1,
}
DOG = 16
"""Its place among the classes."""


def spec(method="single", **workload):
    return make_scenario(
        workers=2,
        speed="10gflops",
        workload={**WORK, **workload},
        method={"name": method},
    )


def weights_that_see_dogs(problem):
    """Return seeded weights whose last bias makes each cell of the grid sure of a dog, by the second anchor."""
    state = problem.model.build(0, len(problem.model.units), problem.seed).state_dict()
    bias = state["30.0.bias"].reshape(5, 85)
    bias[1, 4], bias[1, 5 + DOG] = 8.0, 20.0
    return state


@pytest.mark.parametrize("method", ["single", "sequential", "distributed"])
def test_every_method_detects_the_objects_of_the_plain_model(method):
    problem, data = problem_of(spec(method))
    state = weights_that_see_dogs(problem)
    model = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        outputs = model(torch.from_numpy(data.test_images)).numpy()
    expected = [
        [box.to_json() for box in problem.model.detector.boxes(output)]
        for output in outputs
    ]
    assert expected[0]
    assert expected[0] != expected[1]
    outcome = run_simulated(spec(method), weights=state)
    assert outcome.status == "finished", outcome.error
    found = fields_of(outcome, "objects")
    assert [(event["request"], event["sample"]) for event in found] == [
        (0, 0),
        (1, 1),
        (2, 0),
    ]
    for event in found:
        boxes = expected[event["sample"]]
        assert [box["label"] for box in event["boxes"]] == ["dog"] * len(boxes)
        for side in ("left", "top", "right", "bottom", "score"):
            assert np.allclose(
                [box[side] for box in event["boxes"]],
                [box[side] for box in boxes],
                atol=2e-4,
            )
    # Without labels there is nothing to score.
    assert not fields_of(outcome, "evaluate")


def test_results_contain_boxes_pictures_and_weights(tmp_path):
    chosen = spec()
    (trial,) = trials(chosen)
    problem, data = problem_of(chosen)
    outcome = run_simulated(chosen, weights=weights_that_see_dogs(problem))
    from testbed.methods import METHODS

    plan = METHODS["single"].plan(problem)
    place = recorded.write_run(tmp_path / "run", trial, plan, outcome)
    write_pictures(place, outcome.events, data)
    finished = files.load(place)
    boxes = json.loads((place / "boxes.json").read_text())
    assert [len(answer["boxes"]) for answer in boxes] == [
        len(event["boxes"]) for event in fields_of(outcome, "objects")
    ]
    assert (
        finished.metrics["objects"] == sum(len(answer["boxes"]) for answer in boxes) > 0
    )
    assert sorted(path.name for path in place.glob("*.png")) == [
        "boxes-0.png",
        "boxes-1.png",
    ]
    assert Image.open(place / "boxes-0.png").size == (96, 64)
    assert (
        json.loads((place / "manifest.json").read_text())["weights"]
        == "random, drawn from the seed"
    )
    said = io.StringIO()
    show(Console(file=said, width=100), finished)
    for text in (said.getvalue(), render(finished)):
        assert "dog" in text
        assert "drawn from the seed: the answers are meaningless" in text


def test_a_box_is_drawn_where_it_lies():
    box = {
        "label": "dog",
        "score": 0.9,
        "left": 0.5,
        "top": 0.5,
        "right": 0.75,
        "bottom": 0.75,
    }
    plain = np.full((3, 80, 160), 0.5, np.float32)
    drawn = np.asarray(Image.open(io.BytesIO(draw(plain, [box]))))
    changed = (drawn != 128).any(axis=2)
    assert changed[40:61, 80:82].all()
    assert changed[60, 80:121].all()
    assert not changed[:40].any()
    assert not changed[:, :80].any()

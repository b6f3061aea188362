"""Object detection: equal boxes from every method, and their metrics, files and reports."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from testbed.methods import METHODS
from testbed.scenario.expand import trials
from testbed_controller.report.boxes import draw
from testbed_controller.report.boxes import write as write_pictures
from testbed_controller.report.html import render
from testbed_controller.report.terminal import show
from testbed_controller.results import files
from tests.helpers import recorded
from tests.helpers.runs import fields_of, make_scenario, problem_of, run_simulated
from tests.testbed.methods.outcomes import values_of

WORK = {
    "task": "infer",
    "requests": 3,
    "model": {"name": "yolov2"},
    "data": {"name": "photos-64x96"},
    "batch_size": 1,
}
DOG = 16
"""Index of the class."""
SIDES = ("left", "top", "right", "bottom")


def detection_scenario(method="single"):
    return make_scenario(
        workers=2, speed="10gflops", workload=WORK, method={"name": method}
    )


def dog_detecting_weights(problem):
    """Return seeded weights whose last biases make every cell of the grid report a dog with the second anchor."""
    network = problem.model.build(0, len(problem.model.units), problem.seed)
    state = network.state_dict()
    # Five anchors, each with four sides, an objectness (index 4) and 80 classes.
    bias = state["30.0.bias"].reshape(5, 85)
    bias[1, 4], bias[1, 5 + DOG] = 8.0, 20.0
    return state


def boxes_of_undivided_model(problem, data, weights):
    """Return the boxes of each test sample in the format of events."""
    model = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs = model(torch.from_numpy(data.test_images)).numpy()
    boxes_of_samples = []
    for output in outputs:
        boxes = problem.model.detector.boxes(output)
        boxes_of_samples.append([box.to_json() for box in boxes])
    return boxes_of_samples


def assert_boxes_close(boxes, expected):
    assert [box["label"] for box in boxes] == ["dog"] * len(expected)
    for key in (*SIDES, "score"):
        values = [box[key] for box in boxes]
        expected_values = [box[key] for box in expected]
        # Divided convolutions add up in another order.
        assert np.allclose(values, expected_values, atol=2e-4)


@pytest.mark.parametrize("method", ["single", "sequential", "distributed"])
def test_method_detects_objects_of_undivided_model(method):
    spec = detection_scenario(method)
    problem, data = problem_of(spec)
    weights = dog_detecting_weights(problem)
    expected = boxes_of_undivided_model(problem, data, weights)
    assert expected[0]
    assert expected[0] != expected[1]
    outcome = run_simulated(spec, weights=weights)
    assert outcome.status == "finished", outcome.error
    detections = fields_of(outcome, "objects")
    # Two samples for three requests of one sample.
    assert values_of(outcome, "objects", "request") == [0, 1, 2]
    assert values_of(outcome, "objects", "sample") == [0, 1, 0]
    for event in detections:
        assert_boxes_close(event["boxes"], expected[event["sample"]])
    # Accuracy needs labels, which these pictures lack.
    assert not fields_of(outcome, "evaluate")


@pytest.fixture(scope="module")
def recorded_detection(tmp_path_factory):
    """Write a run with two pictures; return the folder and the outcome."""
    spec = detection_scenario()
    (trial,) = trials(spec)
    problem, data = problem_of(spec)
    outcome = run_simulated(spec, weights=dog_detecting_weights(problem))
    plan = METHODS["single"].plan(problem)
    folder = tmp_path_factory.mktemp("detection") / "run"
    folder = recorded.write_run(folder, trial, plan, outcome)
    write_pictures(folder, outcome.events, data)
    return folder, outcome


def test_results_contain_boxes_and_pictures_with_boxes(recorded_detection):
    folder, outcome = recorded_detection
    answers = json.loads((folder / "boxes.json").read_text())
    box_counts = [len(answer["boxes"]) for answer in answers]
    events = fields_of(outcome, "objects")
    assert box_counts == [len(event["boxes"]) for event in events]
    assert files.load(folder).metrics["objects"] == sum(box_counts) > 0
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == ["boxes-0.png", "boxes-1.png"]
    assert Image.open(folder / "boxes-0.png").size == (96, 64)


def test_reports_warn_about_random_weights(recorded_detection):
    folder, _ = recorded_detection
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["weights"] == "random, drawn from the seed"
    run = files.load(folder)
    terminal = io.StringIO()
    show(Console(file=terminal, width=100), run)
    for text in (terminal.getvalue(), render(run)):
        assert "dog" in text
        assert "drawn from the seed: the answers are meaningless" in text


def test_box_is_drawn_at_relative_position():
    box = {
        "label": "dog",
        "score": 0.9,
        "left": 0.5,
        "top": 0.5,
        "right": 0.75,
        "bottom": 0.75,
    }
    # Grey of 0.5 is 128 of 255; sides are shares of 160 pixels across and 80 down.
    grey = np.full((3, 80, 160), 0.5, np.float32)
    picture = np.asarray(Image.open(io.BytesIO(draw(grey, [box]))))
    changed = (picture != 128).any(axis=2)
    assert changed[40:61, 80:82].all(), "left side"
    assert changed[60, 80:121].all(), "bottom side"
    assert not changed[:40].any(), "nothing above"
    assert not changed[:, :80].any(), "nothing to the left"

"""Metrics by name, piece by piece, against torchmetrics on all at once and against sums by hand."""

from __future__ import annotations

import sys

import pytest
import torch
import torchmetrics

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.metrics import aligned, make_metric, update_metric
from testbed.ml.training.schema import MetricPart


def measured(
    name: str,
    outputs: torch.Tensor,
    labels: torch.Tensor,
    loss: str,
    classes: int,
    pieces: int = 3,
    **keys,
):
    """Return a metric of what is taken in by so many pieces."""
    made = make_metric(MetricPart(name=name, **keys), {}, loss, classes)
    for some, theirs in zip(outputs.chunk(pieces), labels.chunk(pieces), strict=True):
        update_metric(made, name, some, theirs)
    return made.compute()


def test_outputs_are_laid_out_for_the_losses_of_torch() -> None:
    tokens = torch.rand(2, 5, 7)
    whole = aligned(tokens, torch.zeros(2, 5, dtype=torch.int64))
    assert whole.shape == (2, 7, 5)
    assert torch.equal(whole[1, :, 3], tokens[1, 3])
    assert aligned(torch.zeros(4, 1), torch.zeros(4)).shape == (4,)
    assert aligned(torch.zeros(4, 1), torch.zeros(4, 1)).shape == (4, 1)
    assert aligned(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)).shape == (4, 3)
    assert aligned(torch.zeros(4, 2, 1), torch.zeros(4, 2)).shape == (4, 2)


def test_classes_are_counted_over_all_pieces() -> None:
    outputs = torch.eye(3)[torch.tensor([0, 1, 2, 2, 1, 0, 0])]
    labels = torch.tensor([0, 1, 1, 2, 2, 0, 1])
    assert float(
        measured("accuracy", outputs, labels, "cross-entropy", 3, average="micro")
    ) == pytest.approx(4 / 7)
    # Of class 0 both, of class 1 one of three, of class 2 one of two are found.
    mean = (1 + 1 / 3 + 1 / 2) / 3
    assert float(
        measured("recall", outputs, labels, "cross-entropy", 3, average="macro")
    ) == pytest.approx(mean)


def test_several_labels_follow_from_the_loss() -> None:
    outputs = torch.tensor([[5.0, -5.0], [5.0, 5.0], [-5.0, -5.0]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    for loss in ("bce-with-logits", "BCEWithLogitsLoss", "multi-label-soft-margin"):
        assert float(measured("accuracy", outputs, labels, loss, 2)) == pytest.approx(
            (2 / 3 + 2 / 3) / 2
        )


def test_one_output_of_yes_or_no_is_binary() -> None:
    outputs, labels = (
        torch.tensor([[5.0], [-5.0], [5.0]]),
        torch.tensor([[1.0], [0.0], [0.0]]),
    )
    assert float(
        measured("accuracy", outputs, labels, "bce-with-logits", 1)
    ) == pytest.approx(2 / 3)


def test_labels_without_an_axis_of_their_own_are_yes_or_no_too() -> None:
    outputs, labels = (
        torch.tensor([[5.0], [-5.0], [5.0]]),
        torch.tensor([1.0, 0.0, 0.0]),
    )
    assert float(
        measured("accuracy", outputs, labels, "bce-with-logits", 1)
    ) == pytest.approx(2 / 3)


def test_a_task_that_the_scenario_gives_is_kept() -> None:
    outputs, labels = torch.tensor([[5.0], [-5.0]]), torch.tensor([1.0, 0.0])
    assert (
        float(
            measured(
                "accuracy", outputs, labels, "cross-entropy", 1, pieces=1, task="binary"
            )
        )
        == 1.0
    )


def test_tokens_are_classes_in_each_place_and_perplexity_takes_them_as_they_are() -> (
    None
):
    torch.manual_seed(1)
    outputs, labels = torch.randn(6, 5, 4), torch.randint(0, 4, (6, 5))
    right = (outputs.argmax(-1) == labels).float().mean()
    assert float(
        measured("accuracy", outputs, labels, "cross-entropy", 4, average="micro")
    ) == pytest.approx(float(right))
    entropy = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    assert float(
        measured("perplexity", outputs, labels, "cross-entropy", 4)
    ) == pytest.approx(float(entropy.exp()))


def test_numbers_are_those_of_torchmetrics_on_all_at_once() -> None:
    torch.manual_seed(2)
    outputs, labels = torch.randn(10, 1), torch.randn(10)
    expected = torchmetrics.functional.r2_score(outputs.squeeze(-1), labels)
    assert float(measured("r2", outputs, labels, "mse", 1)) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_function_of_a_file_sees_all_outputs_and_labels_as_they_are() -> None:
    text = "def span(outputs, labels, times):\n    return times * (outputs.max() - labels.min()), outputs.shape\n"
    codes = {
        "own.py:span": Code(
            name="span", module="metric_of_a_test", sources={"metric_of_a_test": text}
        )
    }
    made = make_metric(MetricPart(name="span", file="own.py", times=2), codes, "mse", 1)
    for outputs, labels in (([[1.0], [4.0]], [3.0, 0.5]), ([[2.0]], [9.0])):
        update_metric(made, "span", torch.tensor(outputs), torch.tensor(labels))
    value, shape = made.compute()
    assert (float(value), tuple(shape)) == (7.0, (3, 1))


def test_what_a_metric_does_not_take_is_said_with_shapes() -> None:
    made = make_metric(MetricPart(name="mean-absolute-error"), {}, "mse", 1)
    with pytest.raises(
        InputError, match=r"'mae' does not take outputs \(4, 2\) and labels \(4,\)"
    ):
        update_metric(made, "mae", torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(InputError, match="torchmetrics has no 'acuracy'"):
        make_metric(MetricPart(name="acuracy"), {}, "mse", 1)


def test_without_torchmetrics_a_metric_by_name_is_refused_and_one_of_a_file_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(
        InputError,
        match=r"'recall' needs torchmetrics: pip install 'edge-testbed\[metrics\]'",
    ):
        make_metric(MetricPart(name="recall"), {}, "mse", 1)
    text = "def count(outputs, labels):\n    return len(labels)\n"
    code = Code(
        name="count", module="count_of_a_test", sources={"count_of_a_test": text}
    )
    made = make_metric(
        MetricPart(name="count", file="own.py"), {"own.py:count": code}, "mse", 1
    )
    update_metric(made, "count", torch.zeros(4, 2), torch.zeros(4))
    assert made.compute() == 4

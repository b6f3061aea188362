"""Evaluation metrics in several updates, against torchmetrics and hand-computed values."""

from __future__ import annotations

import sys

import pytest
import torch
import torchmetrics

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.metrics import aligned, make_metric, update_metric
from testbed.ml.training.schema import MetricPart


def compute_metric(
    name: str,
    outputs: torch.Tensor,
    labels: torch.Tensor,
    loss: str,
    classes: int,
    updates: int = 3,
    **options: object,
) -> float:
    """Return the value of a metric after several updates with parts of outputs and labels."""
    metric = make_metric(MetricPart(name=name, **options), {}, loss, classes)
    pairs = zip(outputs.chunk(updates), labels.chunk(updates), strict=True)
    for some_outputs, some_labels in pairs:
        update_metric(metric, name, some_outputs, some_labels)
    return float(metric.compute())


def test_classes_of_tokens_move_to_second_axis() -> None:
    outputs = torch.rand(2, 5, 7)
    result = aligned(outputs, torch.zeros(2, 5, dtype=torch.int64))
    # Losses of torch expect (samples, classes, tokens).
    assert result.shape == (2, 7, 5)
    assert torch.equal(result[1, :, 3], outputs[1, 3])


@pytest.mark.parametrize(
    ("outputs", "labels", "shape"),
    [
        (torch.zeros(4, 1), torch.zeros(4), (4,)),
        (torch.zeros(4, 1), torch.zeros(4, 1), (4, 1)),
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), (4, 3)),
        (torch.zeros(4, 2, 1), torch.zeros(4, 2), (4, 2)),
    ],
    ids=["single-number", "equal-shapes", "classes", "number-per-token"],
)
def test_last_axis_of_numbers_is_removed_if_labels_lack_it(
    outputs: torch.Tensor, labels: torch.Tensor, shape: tuple[int, ...]
) -> None:
    assert aligned(outputs, labels).shape == shape


def test_classes_are_counted_over_all_updates() -> None:
    outputs = torch.eye(3)[torch.tensor([0, 1, 2, 2, 1, 0, 0])]
    labels = torch.tensor([0, 1, 1, 2, 2, 0, 1])
    accuracy = compute_metric(
        "accuracy", outputs, labels, "cross-entropy", 3, average="micro"
    )
    assert accuracy == pytest.approx(4 / 7)
    recall = compute_metric(
        "recall", outputs, labels, "cross-entropy", 3, average="macro"
    )
    # Correct are both samples of class 0, one of three of class 1, and one of two of class 2.
    assert recall == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)


@pytest.mark.parametrize(
    "loss", ["bce-with-logits", "BCEWithLogitsLoss", "multi-label-soft-margin"]
)
def test_loss_for_several_labels_selects_multilabel_task(loss: str) -> None:
    outputs = torch.tensor([[5.0, -5.0], [5.0, 5.0], [-5.0, -5.0]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    # Of each label, two of three outputs are correct.
    accuracy = compute_metric("accuracy", outputs, labels, loss, 2)
    assert accuracy == pytest.approx((2 / 3 + 2 / 3) / 2)


@pytest.mark.parametrize("shape", [(3, 1), (3,)], ids=["column", "vector"])
def test_single_output_selects_binary_task(shape: tuple[int, ...]) -> None:
    outputs = torch.tensor([[5.0], [-5.0], [5.0]])
    labels = torch.tensor([1.0, 0.0, 0.0]).reshape(shape)
    accuracy = compute_metric("accuracy", outputs, labels, "bce-with-logits", 1)
    assert accuracy == pytest.approx(2 / 3)


def test_task_of_scenario_precedes_task_of_loss() -> None:
    outputs = torch.tensor([[5.0], [-5.0]])
    labels = torch.tensor([1.0, 0.0])
    # Cross-entropy alone would select the multiclass task. A single update, since two
    # samples cannot be divided into three parts.
    accuracy = compute_metric(
        "accuracy", outputs, labels, "cross-entropy", 1, updates=1, task="binary"
    )
    assert accuracy == 1.0


def test_tokens_are_counted_as_samples() -> None:
    torch.manual_seed(1)
    outputs = torch.randn(6, 5, 4)
    labels = torch.randint(0, 4, (6, 5))
    accuracy = compute_metric(
        "accuracy", outputs, labels, "cross-entropy", 4, average="micro"
    )
    correct = (outputs.argmax(-1) == labels).float().mean()
    assert accuracy == pytest.approx(float(correct))


def test_perplexity_is_exponential_of_cross_entropy() -> None:
    torch.manual_seed(1)
    outputs = torch.randn(6, 5, 4)
    labels = torch.randint(0, 4, (6, 5))
    # This metric receives outputs with the classes on the last axis.
    perplexity = compute_metric("perplexity", outputs, labels, "cross-entropy", 4)
    entropy = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    assert perplexity == pytest.approx(float(entropy.exp()))


def test_several_updates_equal_single_update_of_torchmetrics() -> None:
    torch.manual_seed(2)
    outputs = torch.randn(10, 1)
    labels = torch.randn(10)
    expected = torchmetrics.functional.r2_score(outputs.squeeze(-1), labels)
    r2 = compute_metric("r2", outputs, labels, "mse", 1)
    assert r2 == pytest.approx(float(expected), rel=1e-5)


def test_function_of_user_file_receives_all_outputs_and_labels() -> None:
    text = "def span(outputs, labels, times):\n    return times * (outputs.max() - labels.min()), outputs.shape\n"
    module = "metric_of_a_test"
    code = Code(name="span", module=module, sources={module: text})
    part = MetricPart(name="span", file="own.py", times=2)
    metric = make_metric(part, {"own.py:span": code}, "mse", 1)
    first_outputs, first_labels = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 0.5])
    update_metric(metric, "span", first_outputs, first_labels)
    update_metric(metric, "span", torch.tensor([[2.0]]), torch.tensor([9.0]))
    value, shape = metric.compute()
    # Twice the difference of 4 and 0.5; outputs keep their second axis.
    assert float(value) == 7.0
    assert tuple(shape) == (3, 1)


def test_unsuitable_outputs_are_rejected_with_shapes() -> None:
    metric = make_metric(MetricPart(name="mean-absolute-error"), {}, "mse", 1)
    message = r"'mae' does not take outputs \(4, 2\) and labels \(4,\)"
    with pytest.raises(InputError, match=message):
        update_metric(metric, "mae", torch.zeros(4, 2), torch.zeros(4))


def test_unknown_metric_is_rejected() -> None:
    with pytest.raises(InputError, match="torchmetrics has no 'acuracy'"):
        make_metric(MetricPart(name="acuracy"), {}, "mse", 1)


def test_named_metric_requires_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes the import fail.
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    message = r"'recall' needs torchmetrics: pip install 'edge-testbed\[metrics\]'"
    with pytest.raises(InputError, match=message):
        make_metric(MetricPart(name="recall"), {}, "mse", 1)


def test_metric_of_user_file_needs_no_torchmetrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    text = "def count(outputs, labels):\n    return len(labels)\n"
    module = "count_of_a_test"
    code = Code(name="count", module=module, sources={module: text})
    part = MetricPart(name="count", file="own.py")
    metric = make_metric(part, {"own.py:count": code}, "mse", 1)
    update_metric(metric, "count", torch.zeros(4, 2), torch.zeros(4))
    assert metric.compute() == 4

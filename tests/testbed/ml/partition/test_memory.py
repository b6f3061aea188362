"""Tests of the memory formulas of stages, against sums by hand."""

from testbed.ml.models import create
from testbed.ml.partition.memory import inference_bytes, training_bytes

CNN = create("cnn", {}, (1, 8, 8), 10)


def test_memory_is_weights_gradients_optimizer_state_and_activations_in_flight() -> (
    None
):
    stage = range(3, 5)
    units = CNN.units[3:5]
    parameters = sum(unit.parameters for unit in units)
    outputs = sum(unit.activation_bytes for unit in units)
    per_sample = units[0].input_bytes + outputs
    # 4 bytes each for a weight, its gradient and its momentum.
    with_momentum = training_bytes(CNN, stage, 7, state_values=1.0)
    assert with_momentum == 12 * parameters + 7 * per_sample
    without_state = training_bytes(CNN, stage, 7, state_values=0.0)
    assert without_state == 8 * parameters + 7 * per_sample
    assert training_bytes(CNN, range(0), 7, state_values=1.0) == 0
    # Inference keeps no activations for a backward: the widest unit decides.
    widest = units[0].input_bytes + units[0].activation_bytes
    assert inference_bytes(CNN, stage, 7) == 4 * parameters + 7 * widest


def test_weight_versions_multiply_weights_but_not_optimizer_state() -> None:
    stage = range(len(CNN.units))
    one_version = training_bytes(CNN, stage, 5, state_values=2.0, versions=1)
    three_versions = training_bytes(CNN, stage, 5, state_values=2.0, versions=3)
    assert three_versions - one_version == 2 * 4 * CNN.parameters

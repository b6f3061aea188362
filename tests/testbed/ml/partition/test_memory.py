"""What a stage keeps in memory, counted by hand."""

from testbed.ml.models import create
from testbed.ml.partition.memory import inference_bytes, training_bytes

CNN = create("cnn", {}, (1, 8, 8), 10)


def test_training_memory_is_weights_gradients_momentum_and_what_is_in_flight() -> None:
    units, within = CNN.units[3:5], range(3, 5)
    parameters = sum(unit.parameters for unit in units)
    kept = units[0].input_bytes + sum(unit.activation_bytes for unit in units)
    assert (
        training_bytes(CNN, within, 7, state_values=1.0) == 12 * parameters + 7 * kept
    )
    assert training_bytes(CNN, within, 7, state_values=0.0) == 8 * parameters + 7 * kept
    assert training_bytes(CNN, range(0), 7, state_values=1.0) == 0
    assert inference_bytes(CNN, within, 7) == 4 * parameters + 7 * (
        units[0].input_bytes + units[0].activation_bytes
    )


def test_each_version_of_the_weights_is_kept_and_the_state_of_the_optimizer_once() -> (
    None
):
    whole = range(len(CNN.units))
    one, three = (
        training_bytes(CNN, whole, 5, state_values=2.0, versions=count)
        for count in (1, 3)
    )
    assert three - one == 2 * 4 * CNN.parameters

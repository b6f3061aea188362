"""Tests of the lossy encoding of tensors in messages, and of training and inference with it."""

from __future__ import annotations

import json

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.ml.rounds.client import Changes, send_weights
from testbed.ml.transfer import (
    LargestPart,
    decode_message,
    encode_message,
    encoded_share,
    make_codec,
)
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.wire.message import Message
from tests.helpers.runs import fields_of, make_scenario
from tests.testbed.ml.outcomes import assert_equal_weights, field_values

ENCODINGS = ["f16", "bf16", "int8", "int8-channel", LargestPart(top_k="10%")]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_encoded_message_has_predicted_size_and_decodes_to_original_shapes(
    encoding, device
):
    tensors = {
        "activation": torch.randn(30, 400, device=device),
        "numbers": torch.tensor([3], device=device),
        "empty": torch.zeros(0, 3),
    }
    codec = make_codec(encoding)
    encoded = encode_message(Message("m", {"step": 1}, tensors), codec)
    size = 0
    for name, part in encoded.tensors.items():
        if name.startswith("activation"):
            size += part.nbytes
    # Scales and shapes are sent beside the values, so the size is not exactly the share.
    assert size == pytest.approx(encoded_share(encoding) * 30 * 400 * 4, rel=0.05)
    decoded = decode_message(encoded, codec)
    assert decoded.fields == {"step": 1}
    for name, original in tensors.items():
        tensor = decoded.tensors[name]
        assert tensor.shape == original.shape
        assert tensor.dtype == original.dtype
    # Tensors on the meta device have no values to compare.
    if device == "cpu":
        decoded_again = decode_message(encode_message(decoded, codec), codec)
        for name in tensors:
            assert torch.equal(decoded_again.tensors[name], decoded.tensors[name])


@pytest.mark.parametrize(
    ("encoding", "largest_error"),
    [("f16", 2e-3), ("bf16", 2e-2), ("int8", 0.02), ("int8-channel", 0.02)],
)
def test_decoded_values_are_near_the_original(encoding, largest_error):
    codec = make_codec(encoding)
    tensor = torch.randn(1000).clamp(-3, 3)
    decoded = codec.unpack(codec.pack(tensor))
    assert float((decoded - tensor).abs().max()) <= largest_error
    zeros = torch.zeros(4)
    assert torch.equal(codec.unpack(codec.pack(zeros)), zeros)


def test_int8_with_channel_scales_keeps_channel_of_small_values():
    tensor = torch.stack([torch.full((5,), 1000.0), torch.linspace(0, 0.01, 5)])
    one_scale = make_codec("int8")
    channel_scales = make_codec("int8-channel")
    # With one scale, 1000 / 127, all values of the second row round to 0.
    assert one_scale.unpack(one_scale.pack(tensor))[1].abs().max() == 0
    decoded = channel_scales.unpack(channel_scales.pack(tensor))
    assert torch.allclose(decoded[1], tensor[1], atol=1e-4)


def test_top_k_keeps_largest_values_exactly_and_zeroes_others():
    codec = make_codec(LargestPart(top_k="50%"))
    decoded = codec.unpack(codec.pack(torch.tensor([[1.0, -4.0], [0.5, 2.0]])))
    assert decoded.tolist() == [[0.0, -4.0], [0.0, 2.0]]


def train(method, **workload_keys):
    """Train with a method on two devices; return the outcome and the prepared run."""
    data = {"name": "digits", "train": 400, "test": 100}
    # Devices of a pipeline own no data, so a split is only for the other methods.
    if method["name"] not in ("pipeline", "ftpipehd"):
        data["split"] = "iid"
    workload = {
        "training": {"optimizer": {"learning_rate": 0.1}},
        "steps": 30,
        "data": data,
        **workload_keys,
    }
    (trial,) = trials(make_scenario(2, workload=workload, method=method))
    prepared = prepare(trial)
    outcome = simulate_prepared(prepared)
    assert outcome.status == "finished", outcome.error
    return outcome, prepared


def simulate_prepared(prepared):
    return simulate(prepared, load_data(prepared.scenario.workload.data))


def bytes_sent(outcome, *kinds):
    """Return the bytes of all messages of these kinds."""
    total = 0
    for event in fields_of(outcome, "send"):
        if event["message"] in kinds:
            total += event["bytes"]
    return total


CASES = {
    "pipeline": (
        {"name": "pipeline", "micro_batches": 1},
        {"activations": "f16", "gradients": "int8"},
        ("activation", "gradient"),
        0.9,
    ),
    "asynchronous-pipeline": (
        {"name": "ftpipehd"},
        {"activations": "bf16"},
        ("activation",),
        0.8,
    ),
    "federated-int8-updates": (
        {"name": "federated"},
        {"updates": "int8", "weights": "f16"},
        ("update", "begin"),
        0.6,
    ),
    "federated-top-k-updates": (
        {"name": "federated"},
        {"updates": {"top_k": "10%"}},
        ("update",),
        0.7,
    ),
    "split-learning": (
        {"name": "split-learning", "split_point": 2},
        {"activations": "int8"},
        ("activation",),
        0.8,
    ),
}
"""Method, transfer options, kinds of encoded messages, and upper bound of the share of bytes that remains."""


@pytest.mark.parametrize("case", CASES)
def test_encoded_training_sends_less_and_learns_nearly_as_well(case):
    method, transfer, kinds, largest_share = CASES[case]
    plain, _ = train(method)
    encoding_method = {**method, "transfer": transfer}
    encoded, prepared = train(encoding_method)
    assert bytes_sent(encoded, *kinds) < largest_share * bytes_sent(plain, *kinds)
    last_encoded = fields_of(encoded, "evaluate")[-1]
    last_plain = fields_of(plain, "evaluate")[-1]
    # Encoding is lossy: an equal loss would mean that nothing was encoded.
    assert last_encoded["loss"] != last_plain["loss"]
    assert last_encoded["accuracy"] >= last_plain["accuracy"] - 0.1
    # Sizes of messages follow from shapes, so a timing-only run sends as many bytes.
    timing_only, _ = train(encoding_method, numerics="none")
    assert bytes_sent(timing_only, *kinds) == bytes_sent(encoded, *kinds)
    _, plain_prepared = train(method, steps=1)
    assert prepared.plan.step_time <= plain_prepared.plan.step_time


def test_top_k_adds_omitted_changes_to_next_update():
    changes = Changes(send_weights, make_codec(LargestPart(top_k="50%")))
    start = {"w": torch.zeros(2)}
    # Of [3, 2] the larger value is sent; the omitted 2 exceeds the 1 of the next change.
    first = changes(start, {"w": torch.tensor([3.0, 2.0])})
    second = changes(start, {"w": torch.tensor([1.0, 0.0])})
    assert first["w"].tolist() == [3.0, 0.0]
    assert second["w"].tolist() == [0.0, 2.0]


def infer(transfer):
    """Run inference on three devices; return the bytes of activations and the latency."""
    workload = {
        "task": "infer",
        "requests": 4,
        "data": {"name": "digits", "train": 96, "test": 40},
        "batch_size": 40,
    }
    method = {"name": "sequential", "transfer": transfer}
    (trial,) = trials(make_scenario(2, workload=workload, method=method))
    prepared = prepare(trial)
    outcome = simulate_prepared(prepared)
    assert outcome.status == "finished", outcome.error
    latency = fields_of(outcome, "request")[0]["latency"]
    assert latency == pytest.approx(prepared.plan.details.latency, rel=0.05)
    return bytes_sent(outcome, "activation"), latency


def test_encoded_inference_sends_less_and_latency_matches_plan():
    assert infer({"activations": "int8"}) < infer({})


OWN_CODECS = """
import torch

class Signs:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def pack(self, tensor):
        return {"sign": torch.sign(tensor).to(torch.int8), "mean": tensor.abs().mean().reshape(1) * self.scale}

    def unpack(self, parts):
        return parts["sign"].float() * parts["mean"]

class Half:
    def pack(self, tensor):
        return tensor.half()

    def unpack(self, tensor):
        return tensor.float()
"""


def prepare_with_own_codec(folder, transfer, method="pipeline"):
    """Write `own.py` and a scenario file to a folder, and prepare the scenario."""
    (folder / "own.py").write_text(OWN_CODECS)
    data = {"name": "digits", "train": 64, "test": 20}
    if method == "federated":
        data["split"] = "iid"
    keys = make_scenario(
        2,
        workload={"steps": 4, "data": data},
        method={"name": method, "transfer": transfer},
    )
    # JSON is YAML, so the scenario needs no other writer.
    text = json.dumps(keys.model_dump(mode="json", exclude_unset=True))
    path = folder / "s.yaml"
    path.write_text(text)
    (trial,) = trials(load(path))
    return prepare(trial)


def run_with_own_codec(folder, transfer, method="pipeline"):
    return simulate_prepared(prepare_with_own_codec(folder, transfer, method))


def test_own_codec_encodes_activations_and_gradients(tmp_path):
    half = {"name": "Half", "file": "own.py", "share": "50%"}
    own = run_with_own_codec(tmp_path, {"activations": half, "gradients": half})
    builtin = run_with_own_codec(tmp_path, {"activations": "f16", "gradients": "f16"})
    # `Half` does the same as the built-in f16, so both runs compute the same losses.
    own_losses = field_values(own, "step", "loss")
    assert own_losses == field_values(builtin, "step", "loss")
    signs = {"name": "Signs", "file": "own.py", "scale": 2.0}
    with_signs = run_with_own_codec(tmp_path, {"gradients": signs})
    bytes_of_signs = field_values(with_signs, "send", "bytes")
    bytes_of_halves = field_values(own, "send", "bytes")
    assert sum(bytes_of_signs) < sum(bytes_of_halves)


def test_own_codec_of_updates_equals_builtin_codec_with_same_encoding(tmp_path):
    half = {"name": "Half", "file": "own.py"}
    own = run_with_own_codec(tmp_path, {"updates": half}, "federated")
    builtin = run_with_own_codec(tmp_path, {"updates": "f16"}, "federated")
    assert own.weights.keys() == builtin.weights.keys()
    assert_equal_weights(own.weights, builtin.weights)


def test_unknown_class_and_class_without_file_are_rejected(tmp_path):
    # The error suggests the classes that the file has.
    unknown = {"name": "Halves", "file": "own.py"}
    with pytest.raises(
        InputError, match=r"own.py defines no function 'Halves': .*Signs, Half"
    ):
        prepare_with_own_codec(tmp_path, {"activations": unknown})
    with pytest.raises(InputError, match="give the 'file'"):
        prepare_with_own_codec(tmp_path, {"activations": {"name": "Half"}})

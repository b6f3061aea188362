"""Tensors in fewer bits: what is lost, what travels, and what a training makes of it."""

from __future__ import annotations

import json

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
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
from tests.helpers.runs import fields_of, scenario

WAYS = ["f16", "bf16", "int8", "int8-channel", LargestPart(top_k="10%")]


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_travels_is_as_small_as_said_and_has_the_shape_again(how, device):
    tensors = {
        "a": torch.randn(30, 400, device=device),
        "n": torch.tensor([3], device=device),
        "e": torch.zeros(0, 3),
    }
    by = make_codec(how)
    sent = encode_message(Message("m", {"step": 1}, tensors), by)
    size = sum(
        tensor.nbytes for name, tensor in sent.tensors.items() if name.startswith("a")
    )
    assert size == pytest.approx(encoded_share(how) * 30 * 400 * 4, rel=0.05)
    found = decode_message(sent, by)
    assert found.fields == {"step": 1}
    for name, tensor in tensors.items():
        assert (found.tensors[name].shape, found.tensors[name].dtype) == (
            tensor.shape,
            tensor.dtype,
        )
    if device == "cpu":
        again = decode_message(encode_message(found, by), by)
        assert all(
            torch.equal(again.tensors[name], found.tensors[name]) for name in tensors
        )


@pytest.mark.parametrize(
    ("how", "most"),
    [("f16", 2e-3), ("bf16", 2e-2), ("int8", 0.02), ("int8-channel", 0.02)],
)
def test_values_are_near(how, most):
    tensor, by = torch.randn(1000).clamp(-3, 3), make_codec(how)
    assert float((by.unpack(by.pack(tensor)) - tensor).abs().max()) <= most
    assert torch.equal(by.unpack(by.pack(torch.zeros(4))), torch.zeros(4))


def test_a_channel_of_small_values_keeps_them():
    tensor = torch.stack([torch.full((5,), 1000.0), torch.linspace(0, 0.01, 5)])
    whole, by_channel = (
        by.unpack(by.pack(tensor))
        for by in (make_codec("int8"), make_codec("int8-channel"))
    )
    assert whole[1].abs().max() == 0
    assert torch.allclose(by_channel[1], tensor[1], atol=1e-4)


def test_the_largest_values_are_exact_and_others_zero():
    by = make_codec(LargestPart(top_k="50%"))
    assert by.unpack(by.pack(torch.tensor([[1.0, -4.0], [0.5, 2.0]]))).tolist() == [
        [0.0, -4.0],
        [0.0, 2.0],
    ]


def trained(method, **keys):
    split = {"split": "iid"} if method["name"] not in ("pipeline", "ftpipehd") else {}
    data = {"name": "digits", "train": 400, "test": 100, **split}
    work = {
        "training": {"optimizer": {"learning_rate": 0.1}},
        "steps": 30,
        "data": data,
        **keys,
    }
    prepared = prepare(trials(scenario(2, workload=work, method=method))[0])
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome, prepared


def sent(outcome, *kinds):
    return sum(
        each["bytes"] for each in fields_of(outcome, "send") if each["message"] in kinds
    )


CASES = {
    "a pipeline": (
        {"name": "pipeline", "micro_batches": 1},
        {"activations": "f16", "gradients": "int8"},
        ("activation", "gradient"),
        0.9,
    ),
    "an asynchronous one": (
        {"name": "ftpipehd"},
        {"activations": "bf16"},
        ("activation",),
        0.8,
    ),
    "updates in a byte": (
        {"name": "federated"},
        {"updates": "int8", "weights": "f16"},
        ("update", "begin"),
        0.6,
    ),
    "a tenth of updates": (
        {"name": "federated"},
        {"updates": {"top_k": "10%"}},
        ("update",),
        0.7,
    ),
    "split learning": (
        {"name": "split-learning", "split_point": 2},
        {"activations": "int8"},
        ("activation",),
        0.8,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_sends_less_and_learns_nearly_as_well(case):
    method, transfer, kinds, most = CASES[case]
    plain, _ = trained(method)
    found, prepared = trained({**method, "transfer": transfer})
    assert sent(found, *kinds) < most * sent(plain, *kinds)
    assert (
        fields_of(found, "evaluate")[-1]["loss"]
        != fields_of(plain, "evaluate")[-1]["loss"]
    )
    assert (
        fields_of(found, "evaluate")[-1]["accuracy"]
        >= fields_of(plain, "evaluate")[-1]["accuracy"] - 0.1
    )
    without, _ = trained({**method, "transfer": transfer}, numerics="none")
    assert sent(without, *kinds) == sent(found, *kinds)
    assert prepared.plan.step_time <= trained(method, steps=1)[1].plan.step_time


def test_what_top_k_leaves_out_comes_later():
    from testbed.ml.rounds.client import Changes, send_weights

    changes, start = (
        Changes(send_weights, make_codec(LargestPart(top_k="50%"))),
        {"w": torch.zeros(2)},
    )
    first = changes(start, {"w": torch.tensor([3.0, 2.0])})
    second = changes(start, {"w": torch.tensor([1.0, 0.0])})
    assert first["w"].tolist() == [3.0, 0.0]
    assert second["w"].tolist() == [0.0, 2.0]


def test_an_inference_sends_less_and_its_plan_knows():
    found = []
    for transfer in ({}, {"activations": "int8"}):
        method = {"name": "sequential", "transfer": transfer}
        data = {"name": "digits", "train": 96, "test": 40}
        work = {"task": "infer", "requests": 4, "data": data, "batch_size": 40}
        (trial,) = trials(scenario(2, workload=work, method=method))
        prepared = prepare(trial)
        outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
        assert outcome.status == "finished", outcome.error
        latency = fields_of(outcome, "request")[0]["latency"]
        assert latency == pytest.approx(prepared.plan.details.latency, rel=0.05)
        found.append((sent(outcome, "activation"), latency))
    assert found[1] < found[0]


OWN = """
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


def own(folder, transfer, method="pipeline", **more):
    (folder / "own.py").write_text(OWN)
    split = {"split": "iid"} if method == "federated" else {}
    given = scenario(
        2,
        workload={
            "steps": 4,
            "data": {"name": "digits", "train": 64, "test": 20, **split},
            **more,
        },
        method={"name": method, "transfer": transfer},
    )
    (folder / "s.yaml").write_text(
        json.dumps(given.model_dump(mode="json", exclude_unset=True))
    )
    return prepare(trials(load(folder / "s.yaml"))[0])


def run(prepared):
    return simulate(prepared, load_data(prepared.scenario.workload.data))


def test_a_class_of_a_file_packs_what_crosses(tmp_path):
    half = {"name": "Half", "file": "own.py", "share": "50%"}
    ours, builtin = (
        run(own(tmp_path, {"activations": how, "gradients": how}))
        for how in (half, "f16")
    )
    assert [each["loss"] for each in fields_of(ours, "step")] == [
        each["loss"] for each in fields_of(builtin, "step")
    ]
    signs = run(
        own(tmp_path, {"gradients": {"name": "Signs", "file": "own.py", "scale": 2.0}})
    )
    assert sum(each["bytes"] for each in fields_of(signs, "send")) < sum(
        each["bytes"] for each in fields_of(ours, "send")
    )


def test_updates_by_a_class_of_a_file_are_what_it_unpacks_and_what_is_left_comes_later(
    tmp_path,
):
    half = {"name": "Half", "file": "own.py"}
    ours, builtin = (
        run(own(tmp_path, {"updates": how}, "federated")) for how in (half, "f16")
    )
    assert ours.weights.keys() == builtin.weights.keys()
    assert all(
        torch.equal(ours.weights[name], tensor)
        for name, tensor in builtin.weights.items()
    )


def test_a_class_that_is_not_there_and_one_of_no_file_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"own.py defines no function 'Halves': .*Signs, Half"
    ):
        own(tmp_path, {"activations": {"name": "Halves", "file": "own.py"}})
    with pytest.raises(InputError, match="give the 'file'"):
        own(tmp_path, {"activations": {"name": "Half"}})

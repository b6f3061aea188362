"""Versions of a module's weights, and running statistics that change with the backward of their batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testbed.ml.layers.versions import Statistics, Versions


def make_module() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )


def add_version(versions: Versions, oldest_needed: int) -> None:
    """Make the next version by adding one to every weight, and free versions before ``oldest_needed``."""
    with torch.no_grad():
        for parameter in versions.begin_next(oldest_needed).values():
            parameter.add_(1.0)
    versions.forget(oldest_needed)


def test_module_computes_with_selected_version() -> None:
    module = make_module()
    inputs = torch.rand(5, 3)
    versions = Versions(module)
    initial_outputs = module(inputs).detach()
    add_version(versions, oldest_needed=0)
    assert len(versions) == 2
    versions.use(1)
    assert not torch.equal(module(inputs), initial_outputs)
    versions.use(0)
    assert torch.equal(module(inputs), initial_outputs)
    assert set(module.state_dict()) == set(versions.newest_parameters)


def test_backward_uses_version_of_its_forward() -> None:
    module = make_module()
    versions = Versions(module)
    loss = module(torch.rand(5, 3)).sum()
    parameters = list(versions[0].values())
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    add_version(versions, oldest_needed=0)
    add_version(versions, oldest_needed=0)
    versions.use(2)
    loss.backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    # Gradients belong to the version of the forward, not to the newest one.
    assert all(
        parameter.grad is None for parameter in versions.newest_parameters.values()
    )


def memory_addresses(versions: Versions) -> dict[str, int]:
    addresses = {}
    for name, parameter in versions.newest_parameters.items():
        addresses[name] = parameter.data_ptr()
    return addresses


def test_version_without_pending_batches_is_updated_in_place() -> None:
    versions = Versions(make_module())
    before = memory_addresses(versions)
    # No batch needs version 0 after the update.
    add_version(versions, oldest_needed=1)
    assert len(versions) == 1
    assert memory_addresses(versions) == before


def test_unneeded_versions_are_freed() -> None:
    versions = Versions(make_module())
    for _ in range(4):
        add_version(versions, oldest_needed=0)
    # Of versions 0 to 4, the last two remain.
    versions.forget(3)
    assert len(versions) == 2
    with pytest.raises(KeyError):
        versions[2]
    # The newest version is never freed.
    versions.forget(100)
    assert len(versions) == 1


def test_restart_renumbers_newest_version() -> None:
    versions = Versions(make_module())
    add_version(versions, oldest_needed=0)
    versions.restart(17)
    assert versions.newest == 17
    add_version(versions, oldest_needed=17)
    assert len(versions) == 2


def test_aggregation_replaces_newest_version_by_mean() -> None:
    versions = Versions(make_module())
    initial = {}
    for name, parameter in versions.newest_parameters.items():
        initial[name] = parameter.detach().clone()
    add_version(versions, oldest_needed=0)
    add_version(versions, oldest_needed=0)
    versions.aggregate(3)
    # The mean of the initial weights plus 0, 1 and 2.
    for name, parameter in versions.newest_parameters.items():
        torch.testing.assert_close(parameter.detach(), initial[name] + 1.0)
    # Version 1 is unchanged.
    assert torch.equal(versions[1]["0.bias"], initial["0.bias"] + 1.0)


def test_running_statistics_change_with_backward_of_batch() -> None:
    torch.manual_seed(2)
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    reference = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    initial_mean = module[0].running_mean.clone()
    batches = {key: torch.rand(4, 3, 5, 5) for key in "abc"}
    statistics = Statistics(module)
    for key, images in batches.items():
        with statistics.set_aside(key):
            outputs = module(images)
        assert torch.equal(outputs, reference(images))
    assert torch.equal(module[0].running_mean, initial_mean)
    statistics.apply("a")
    statistics.apply("b")
    # A batch without backward, such as after a failure, leaves no trace.
    statistics.drop("c")
    expected = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    expected(batches["a"])
    expected(batches["b"])
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
    with pytest.raises(KeyError):
        statistics.apply("c")


@pytest.mark.parametrize(
    "settings",
    # Without momentum torch computes the mean over all batches.
    [{"momentum": None}, {"momentum": 0.3}, {"track_running_stats": False}],
    ids=["cumulative", "momentum", "untracked"],
)
def test_applied_statistics_equal_torch(settings: dict[str, Any]) -> None:
    module = torch.nn.BatchNorm2d(3, **settings)
    reference = torch.nn.BatchNorm2d(3, **settings)
    statistics = Statistics(module)
    for key in range(3):
        inputs = torch.rand(4, 3, 2, 2)
        with statistics.set_aside(key):
            module(inputs)
        statistics.apply(key)
        reference(inputs)
    for name, value in reference.named_buffers():
        assert torch.allclose(module.get_buffer(name), value, atol=1e-6), name

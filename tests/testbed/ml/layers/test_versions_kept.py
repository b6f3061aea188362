"""Versions of a module's weights, and running statistics that wait for their batch's backward."""

import pytest
import torch

from testbed.ml.layers.versions import Statistics, Versions


def module():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )


def moved(versions, oldest_needed):
    """Make the next version by adding one to every weight."""
    with torch.no_grad():
        for parameter in versions.begin_next(oldest_needed).values():
            parameter.add_(1.0)
    versions.forget(oldest_needed)


def test_module_computes_with_the_version_asked_for():
    net = module()
    inputs, versions = torch.rand(5, 3), Versions(net)
    before = net(inputs).detach()
    moved(versions, 0)
    assert len(versions) == 2
    versions.use(1)
    after = net(inputs).detach()
    assert not torch.equal(before, after)
    versions.use(0)
    assert torch.equal(net(inputs), before)
    assert set(net.state_dict()) == set(versions.latest)


def test_backward_uses_the_version_of_its_forward():
    net = module()
    inputs, versions = torch.rand(5, 3), Versions(net)
    loss = net(inputs).sum()
    expected = torch.autograd.grad(loss, list(versions[0].values()), retain_graph=True)
    moved(versions, 0)
    moved(versions, 0)
    versions.use(2)
    loss.backward()
    for parameter, gradient in zip(versions[0].values(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in versions.latest.values())


def test_unneeded_versions_are_updated_in_place():
    versions = Versions(module())
    places = {name: parameter.data_ptr() for name, parameter in versions.latest.items()}
    moved(versions, 1)
    assert len(versions) == 1
    assert {
        name: parameter.data_ptr() for name, parameter in versions.latest.items()
    } == places


def test_versions_are_freed_and_renumbered():
    versions = Versions(module())
    for _ in range(4):
        moved(versions, 0)
    versions.forget(3)
    assert len(versions) == 2
    with pytest.raises(KeyError):
        versions[2]
    versions.forget(100)  # the newest stays whatever happens
    assert len(versions) == 1
    versions.restart(17)
    assert versions.newest == 17
    moved(versions, 17)
    assert len(versions) == 2


def test_mean_of_the_last_versions_becomes_the_newest():
    versions = Versions(module())
    first = {
        name: parameter.detach().clone() for name, parameter in versions.latest.items()
    }
    moved(versions, 0)
    moved(versions, 0)
    versions.aggregate(3)
    for name, parameter in versions.latest.items():
        torch.testing.assert_close(parameter.detach(), first[name] + 1.0)
    assert torch.equal(versions[1]["0.bias"], first["0.bias"] + 1.0)


def test_running_statistics_follow_the_backwards():
    torch.manual_seed(2)
    ours, theirs = (torch.nn.Sequential(torch.nn.BatchNorm2d(3)) for _ in range(2))
    batches = {key: torch.rand(4, 3, 5, 5) for key in "abc"}
    statistics = Statistics(ours)
    for key, images in batches.items():
        with statistics.set_aside(key):
            outputs = ours(images)
        assert torch.equal(outputs, theirs(images))
    fresh = torch.nn.BatchNorm2d(3)
    assert torch.equal(ours[0].running_mean, fresh.running_mean)
    for key in "ab":
        statistics.apply(key)
    statistics.drop("c")
    expected = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    for key in "ab":
        expected(batches[key])
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor)
    with pytest.raises(KeyError):
        statistics.apply("c")


@pytest.mark.parametrize(
    "settings",
    [{"momentum": None}, {"momentum": 0.3}, {"track_running_stats": False}],
    ids=str,
)
def test_statistics_of_all_kinds_of_normalisation_follow(settings):
    ours, theirs = (
        torch.nn.BatchNorm2d(3, **settings),
        torch.nn.BatchNorm2d(3, **settings),
    )
    statistics = Statistics(ours)
    for key in range(3):
        inputs = torch.rand(4, 3, 2, 2)
        with statistics.set_aside(key):
            ours(inputs)
        statistics.apply(key)
        theirs(inputs)
    for name, value in theirs.named_buffers():
        assert torch.allclose(ours.get_buffer(name), value, atol=1e-6), name

"""Tags of images, which are hashes of their contents, and sizes and places of images."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed_controller.lab import images, wheels
from testbed_controller.lab.paths import RECIPES, package_folder


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of all sources of the images, which tests may edit."""
    shutil.copytree(RECIPES, tmp_path / "images")
    for package in ("testbed", "testbed_agent", "testbed_controller"):
        shutil.copytree(
            package_folder(package),
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    monkeypatch.setattr(images, "package_folder", lambda package: tmp_path / package)
    monkeypatch.setattr(images, "RECIPES", tmp_path / "images")
    monkeypatch.setattr(wheels, "RECIPES", tmp_path / "images")
    return tmp_path


def test_tags_depend_only_on_contents_of_images(checkout: Path) -> None:
    tags = images.image_tags()
    compiled = checkout / "testbed" / "__pycache__"
    compiled.mkdir(exist_ok=True)
    (compiled / "device.cpython-311.pyc").write_bytes(b"x")
    # No image contains the controller.
    (checkout / "testbed_controller" / "lab.py").write_text("# changed")
    assert images.image_tags() == tags
    for tag in tags.by_kind.values():
        assert re.fullmatch(r"testbed/[a-z]+:[0-9a-f]{16}", tag)


def changed_kinds(before: images.ImageTags, after: images.ImageTags) -> set[str]:
    return {kind for kind, tag in before.by_kind.items() if after.by_kind[kind] != tag}


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("testbed_agent/control.py", {"device"}),
        ("testbed/wire/message.py", {"device", "shaper"}),
        ("testbed_controller/shaping/plan.py", {"shaper"}),
        ("images/device.Dockerfile", {"device"}),
        (
            "images/runtime.Dockerfile",
            {"device", "shaper", "device_runtime", "shaper_runtime"},
        ),
        (
            "images/shaper.packages",
            {"device", "shaper", "device_runtime", "shaper_runtime", "base"},
        ),
    ],
)
def test_edit_changes_tags_of_image_and_later_layers(
    checkout: Path, file: str, kinds: set[str]
) -> None:
    before = images.image_tags()
    path = checkout / file
    path.write_text(path.read_text() + "\nnew\n")
    assert changed_kinds(before, images.image_tags()) == kinds


def test_renamed_file_changes_tag(checkout: Path) -> None:
    before = images.image_tags()
    agent = checkout / "testbed_agent"
    (agent / "control.py").rename(agent / "steering.py")
    assert changed_kinds(before, images.image_tags()) == {"device"}


def test_digest_separates_names_from_contents() -> None:
    assert images.digest({"a": b"bc"}) != images.digest({"ab": b"c"})
    first = images.digest({"a": b"1", "b": b"2"})
    assert first == images.digest({"b": b"2", "a": b"1"})


def test_lists_of_packages_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("# heading\niproute2\n\niptables  # reason\n")
    assert wheels.read_list(path) == ["iproute2", "iptables"]


def test_size_of_image_is_size_on_disk() -> None:
    # Docker 29.7.2 with a containerd store lists this size; `inspect` has that of compressed layers, 337 MB.
    listed = [{"Size": 1_560_000_000}]
    client: Any = SimpleNamespace(api=SimpleNamespace(images=lambda name: listed))
    assert images.image_size(client, "testbed/device:0") == 1_560_000_000


@pytest.mark.parametrize(
    ("driver", "containerd", "folder"),
    [
        ([["Backing Filesystem", "extfs"]], None, "/data/docker"),
        (
            [["driver-type", "io.containerd.snapshotter.v1"]],
            "/run/containerd/containerd.sock",
            "/var/lib/containerd",
        ),
        (
            [["driver-type", "io.containerd.snapshotter.v1"]],
            "/run/docker/containerd/containerd.sock",
            "/data/docker",
        ),
    ],
)
def test_folder_of_images_depends_on_storage_driver(
    driver: list[list[str]], containerd: str | None, folder: str
) -> None:
    # Docker's own containerd stores images below Docker's data folder, a separate one does not.
    info = {"DriverStatus": driver, "DockerRootDir": "/data/docker"}
    if containerd:
        info["Containerd"] = {"Address": containerd}
    assert images.image_folder(info) == Path(folder)

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
    """A copy of all that goes into the images, to edit."""
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


def test_tags_name_the_content_alone(checkout: Path) -> None:
    first = images.image_tags()
    (checkout / "testbed" / "__pycache__").mkdir(exist_ok=True)
    (checkout / "testbed" / "__pycache__" / "device.cpython-311.pyc").write_bytes(b"x")
    (checkout / "testbed_controller" / "lab.py").write_text(
        "# the controller is in no image"
    )
    assert images.image_tags() == first
    assert all(
        re.fullmatch(r"testbed/[a-z]+:[0-9a-f]{16}", tag)
        for tag in first.by_kind.values()
    )


def changed(before: images.ImageTags, after: images.ImageTags) -> set[str]:
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
def test_edit_changes_the_tags_of_its_image_and_of_later_layers(
    checkout: Path, file: str, kinds: set[str]
) -> None:
    before = images.image_tags()
    path = checkout / file
    path.write_text(path.read_text() + "\nnew\n")
    assert changed(before, images.image_tags()) == kinds


def test_a_file_that_moves_changes_the_tag_though_its_bytes_do_not(
    checkout: Path,
) -> None:
    before = images.image_tags()
    (checkout / "testbed_agent" / "control.py").rename(
        checkout / "testbed_agent" / "steering.py"
    )
    assert changed(before, images.image_tags()) == {"device"}


def test_the_hash_keeps_names_and_contents_apart() -> None:
    assert images.digest({"a": b"bc"}) != images.digest({"ab": b"c"})
    assert images.digest({"a": b"1", "b": b"2"}) == images.digest(
        {"b": b"2", "a": b"1"}
    )


def test_lists_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("# what\niproute2\n\niptables  # why\n")
    assert wheels.read_list(path) == ["iproute2", "iptables"]


def test_the_size_of_an_image_is_that_on_the_disk_and_not_of_its_compressed_layers() -> (
    None
):
    listed = [
        {"Size": 1_560_000_000}
    ]  # as of Docker 29.7.2 with its containerd store, which inspects 337 MB
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
def test_room_is_looked_for_where_images_lie(
    driver: list[list[str]], containerd: str | None, folder: str
) -> None:
    info = {"DriverStatus": driver, "DockerRootDir": "/data/docker"}
    if containerd:
        info["Containerd"] = {"Address": containerd}
    assert images.image_folder(info) == Path(folder)

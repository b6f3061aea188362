import re
from pathlib import Path

import pytest

from controller.lab import images, wheels


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that goes into the images, to edit."""
    for part in ("images", *images.CODE["device"], *images.CODE["shaper"]):
        source = images.ROOT / part
        for path in [source] if source.is_file() else source.rglob("*"):
            if path.is_file():
                target = tmp_path / path.relative_to(images.ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    monkeypatch.setattr(images, "ROOT", tmp_path)
    monkeypatch.setattr(images, "RECIPES", tmp_path / "images")
    monkeypatch.setattr(wheels, "RECIPES", tmp_path / "images")
    return tmp_path


def test_tags_name_the_content_alone(checkout: Path) -> None:
    first = images.names()
    (checkout / "testbed" / "__pycache__").mkdir(exist_ok=True)
    (checkout / "testbed" / "__pycache__" / "device.cpython-311.pyc").write_bytes(b"x")
    (checkout / "controller" / "lab.py").write_text("# the controller is in no image")
    assert images.names() == first
    assert all(re.fullmatch(r"testbed/[a-z]+:[0-9a-f]{16}", tag) for tag in vars(first).values())


def changed(before: images.ImageTags, after: images.ImageTags) -> set[str]:
    return {kind for kind, tag in vars(before).items() if vars(after)[kind] != tag}


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("agent/control.py", {"device"}),
        ("testbed/wire/message.py", {"device", "shaper"}),
        ("controller/shaping/plan.py", {"shaper"}),
        ("images/device.Dockerfile", {"device"}),
        ("images/runtime.Dockerfile", {"device", "shaper", "device_runtime", "shaper_runtime"}),
        ("images/shaper.packages", {"device", "shaper", "device_runtime", "shaper_runtime", "base"}),
    ],
)
def test_an_edit_renames_what_it_goes_into_and_what_stands_on_it(checkout: Path, file: str, kinds: set[str]) -> None:
    before = images.names()
    path = checkout / file
    path.write_text(path.read_text() + "\nnew\n")
    assert changed(before, images.names()) == kinds


def test_a_file_that_moves_changes_the_tag_though_its_bytes_do_not(checkout: Path) -> None:
    before = images.names()
    (checkout / "agent" / "control.py").rename(checkout / "agent" / "steering.py")
    assert changed(before, images.names()) == {"device"}


def test_the_hash_keeps_names_and_contents_apart() -> None:
    assert images.digest({"a": b"bc"}) != images.digest({"ab": b"c"})
    assert images.digest({"a": b"1", "b": b"2"}) == images.digest({"b": b"2", "a": b"1"})


def test_lists_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("# what\niproute2\n\niptables  # why\n")
    assert wheels.read_list(path) == ["iproute2", "iptables"]

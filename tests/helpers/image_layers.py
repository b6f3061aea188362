"""Images of this machine's engine in the data root of another, without a copy: the folders of their layers are mounted.

Layers are only read, so that two engines may have the same files. Only ``overlay2`` has them in folders; elsewhere
nothing is shared, and a lab brings its images as it does to any host.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import docker

STORE = Path("image/overlay2")
LAYERS = Path("overlay2")


def unshareable_reason(client: docker.DockerClient) -> str:
    """Say why other engines cannot have the layers of this one; else an empty text."""
    info = client.info()
    if info["Driver"] == "overlay2" and (Path(info["DockerRootDir"]) / STORE).is_dir():
        return ""
    return "this engine keeps images by another driver than overlay2"


def share_images(
    client: docker.DockerClient, tags: Iterable[str], root: Path
) -> list[str]:
    """Put images into the data root of an engine that has not started yet.

    Returns the commands that the engine has to be started after, in its own mount namespace.
    """
    if unshareable_reason(client):
        return []
    source = Path(client.info()["DockerRootDir"])
    names = {tag: client.images.get(tag).id for tag in tags}
    mounts: dict[Path, list[str]] = {}
    for image in set(names.values()):
        config = STORE / "imagedb/content/sha256" / image.removeprefix("sha256:")
        (root / config).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / config, root / config)
        above = ""
        for layer in json.loads((source / config).read_text())["rootfs"]["diff_ids"]:
            above = (
                f"sha256:{hashlib.sha256(f'{above} {layer}'.encode()).hexdigest()}"
                if above
                else layer
            )
            known = STORE / "layerdb/sha256" / above.removeprefix("sha256:")
            if known not in mounts:
                shutil.copytree(source / known, root / known)
                mounts[known] = _mount(
                    source, root, LAYERS / (source / known / "cache-id").read_text()
                )
    repositories: dict[str, dict[str, str]] = {}
    for tag, image in names.items():
        repositories.setdefault(tag.split(":")[0], {})[tag] = image
    (root / STORE / "repositories.json").write_text(
        json.dumps({"Repositories": repositories})
    )
    # The engine mounts these on themselves, beneath what is mounted in them, unless they are mounts already.
    own = [f"mount --bind {each} {each}" for each in (root, root / LAYERS)]
    own.insert(1, f"mount --make-shared {root}")
    return [*own, *(command for commands in mounts.values() for command in commands)]


def _mount(source: Path, root: Path, layer: Path) -> list[str]:
    """Give a layer the short name by which others mount it; return what makes its folder appear, to be read only."""
    (root / layer / "work").mkdir(parents=True)
    (root / layer / "diff").mkdir()
    for each in (source / layer).iterdir():
        if each.is_file():
            shutil.copyfile(each, root / layer / each.name)
    (root / LAYERS / "l").mkdir(exist_ok=True)
    (root / LAYERS / "l" / (source / layer / "link").read_text()).symlink_to(
        f"../{layer.name}/diff"
    )
    files = source / layer / "diff", root / layer / "diff"
    return [
        f"mount --bind {files[0]} {files[1]}",
        f"mount -o remount,bind,ro {files[1]}",
    ]

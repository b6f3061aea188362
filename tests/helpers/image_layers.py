"""Sharing of images between Docker engines of one machine: folders of layers are mounted instead of copied.

Engines only read layers, so two engines can use the same files. Only the storage driver ``overlay2`` keeps layers in
folders; with another driver nothing is shared, and a lab transfers its images as to any host.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker

STORE = Path("image/overlay2")
LAYERS = Path("overlay2")


def unshareable_reason(client: docker.DockerClient) -> str:
    """Return why layers of an engine cannot be shared, or an empty text."""
    info = client.info()
    if info["Driver"] == "overlay2" and (Path(info["DockerRootDir"]) / STORE).is_dir():
        return ""
    return "this engine stores images with another driver than overlay2"


def share_images(
    client: docker.DockerClient, tags: Iterable[str], root: Path
) -> list[str]:
    """Add images to the data root of an engine before its start.

    Returns shell commands to run before the engine, in its mount namespace.
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
        for chain_id in _chain_ids(json.loads((source / config).read_text())):
            entry = STORE / "layerdb/sha256" / chain_id.removeprefix("sha256:")
            if entry not in mounts:
                shutil.copytree(source / entry, root / entry)
                layer = LAYERS / (source / entry / "cache-id").read_text()
                mounts[entry] = _share_layer(source, root, layer)
    repositories: dict[str, dict[str, str]] = {}
    for tag, image in names.items():
        repositories.setdefault(tag.split(":")[0], {})[tag] = image
    (root / STORE / "repositories.json").write_text(
        json.dumps({"Repositories": repositories})
    )
    # The engine would bind these folders to themselves, which hides the layers mounted in them. It leaves out folders
    # that are mounts already.
    commands = [
        f"mount --bind {root} {root}",
        f"mount --make-shared {root}",
        f"mount --bind {root / LAYERS} {root / LAYERS}",
    ]
    for layer_mounts in mounts.values():
        commands += layer_mounts
    return commands


def _chain_ids(config: dict[str, Any]) -> list[str]:
    """Return the identifiers of an image's layers in the layer database, by the OCI rule for chain ids."""
    chain_ids: list[str] = []
    for diff_id in config["rootfs"]["diff_ids"]:
        if chain_ids:
            digest = hashlib.sha256(f"{chain_ids[-1]} {diff_id}".encode()).hexdigest()
            chain_ids.append(f"sha256:{digest}")
        else:
            chain_ids.append(diff_id)
    return chain_ids


def _share_layer(source: Path, root: Path, layer: Path) -> list[str]:
    """Create the folder and the short name of a layer, and return the commands for mounting the content."""
    (root / layer / "work").mkdir(parents=True)
    (root / layer / "diff").mkdir()
    for path in (source / layer).iterdir():
        if path.is_file():
            shutil.copyfile(path, root / layer / path.name)
    # Engines mount layers by short names, since the kernel limits the length of mount options.
    short_names = root / LAYERS / "l"
    short_names.mkdir(exist_ok=True)
    short_name = (source / layer / "link").read_text()
    (short_names / short_name).symlink_to(f"../{layer.name}/diff")
    content, mount_point = source / layer / "diff", root / layer / "diff"
    return [
        f"mount --bind {content} {mount_point}",
        # The kernel ignores `ro` in the bind itself.
        f"mount -o remount,bind,ro {mount_point}",
    ]

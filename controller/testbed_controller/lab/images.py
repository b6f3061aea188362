"""Images of devices and shaper: content, tags, builds, and look-up.

The tag of each image is a hash of its inputs, so an existing image is valid and nothing is built twice. Each image is
based on the one before: ``base`` (Debian and Python), ``runtime`` (Python packages, separate for device and shaper),
and a thin layer with the project's code, which is rebuilt within seconds. Further kinds are ``agent``, ``program`` and
``packages`` for images of users (`testbed_controller.lab.programimages`), and ``stage``, which an interrupted build of
several Dockerfile stages leaves behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, BuildError, ImageNotFound
from docker.models.images import Image

from testbed.common.errors import HostError
from testbed_controller.lab.engine import Say, describe_refusal_within, install_packages
from testbed_controller.lab.paths import BUILD, RECIPES, package_folder
from testbed_controller.lab.wheels import (
    PYTHON,
    Target,
    describe_full_disk,
    fetch_cpu_torch,
    fetch_wheels,
    host_machine,
    list_packages,
    machine_name,
    read_list,
    requirements,
    torch_builds,
)

REGISTRY_BASE = f"python:{PYTHON}-slim-bookworm"
"""Official Python image on Debian 12, the preferred source of the base image."""
PULL_TIMEOUT = 60.0
"""Seconds to wait for the base image from a registry; after that, the image is made without a registry."""
_BOOTSTRAP_SPACE = 600 * 10**6
"""Temporary disk space of mmdebstrap in bytes: packages, their files, and the archive."""
LABEL = "testbed.image"
"""Label of the testbed's images; its value is the kind of image."""
_ABANDONED_AFTER = 3600.0
"""Age in seconds after which no build can still use a stage."""
_SYSTEM_CONTAINERD = (
    "/run/containerd/containerd.sock",
    "/var/run/containerd/containerd.sock",
)
"""Sockets of a system containerd, whose data is outside the engine's folder."""

CODE = {
    "device": ("testbed", "testbed_agent"),
    "shaper": (
        "testbed",
        "testbed_controller/__init__.py",
        "testbed_controller/shaping",
        "testbed_controller/hosts/__init__.py",
        "testbed_controller/hosts/inside",
    ),
    "agent": ("testbed", "testbed_agent"),
}
"""The packages, or parts of packages, in each image."""
HOST_ONLY = (
    "testbed/scenario/",
    "testbed/simulation/",
    "testbed/prepare.py",
    "testbed/validation.py",
)
"""Files excluded from all images: scenarios are read, planned and simulated on the host."""

SPARE = {
    "program": 4,
    "packages": 4,
    "device": 8,
    "shaper": 8,
    "agent": 2,
    "runtime": 4,
    "base": 2,
    "stage": 0,
}
"""Number of old images of each kind to keep after a build, for a quick return to another version.

An image comes before those that it is based on, because the engine refuses to remove them while it exists.
"""


@dataclass(frozen=True)
class ImageTags:
    """The image tags for the current code."""

    base: str
    device_runtime: str
    shaper_runtime: str
    device: str
    shaper: str
    target: Target
    """Platform and torch build of the packages."""

    @property
    def by_kind(self) -> dict[str, str]:
        """Return the tag of each kind of image."""
        return {
            "base": self.base,
            "device_runtime": self.device_runtime,
            "shaper_runtime": self.shaper_runtime,
            "device": self.device,
            "shaper": self.shaper,
        }


def image_tags(target: Target | None = None) -> ImageTags:
    """Return the tags for the current files, without contacting an engine.

    The default target is this machine's architecture with the preferred build of torch.
    """
    target = target or Target(host_machine(), torch_builds()[0])
    return _tags_for(_files_by_kind(), target)


def find_tags(client: docker.DockerClient) -> ImageTags:
    """Return the tags for a run on this engine, preferably of a torch build whose images exist."""
    code = _files_by_kind()
    return _choose(client, [_tags_for(code, target) for target in _targets(client)])


def _files_by_kind() -> dict[str, dict[str, bytes]]:
    """Return the files of the device and shaper images, which every run needs, by kind of image."""
    return {kind: _code_files(kind) for kind in ("device", "shaper")}


def _targets(client: docker.DockerClient) -> list[Target]:
    machine = machine_name(str(client.info().get("Architecture") or host_machine()))
    return [Target(machine, torch_build) for torch_build in torch_builds()]


def _choose(client: docker.DockerClient, choices: Sequence[ImageTags]) -> ImageTags:
    """Return the first choice whose device image exists, else whose device runtime exists, else the first choice."""
    for kind in ("device", "device_runtime"):
        for tags in choices:
            if image_exists(client, getattr(tags, kind)):
                return tags
    return choices[0]


def _tags_for(code: Mapping[str, Mapping[str, bytes]], target: Target) -> ImageTags:
    runtimes = {}
    tags = {}
    for kind, files in code.items():
        runtimes[kind] = _runtime_tag(kind, target)
        tags[kind] = _code_tag(kind, files, runtimes[kind])
    return ImageTags(
        base=_base_tag(),
        device_runtime=runtimes["device"],
        shaper_runtime=runtimes["shaper"],
        device=tags["device"],
        shaper=tags["shaper"],
        target=target,
    )


def _base_tag() -> str:
    packages = "\n".join(_base_packages())
    # The name of the target file does not change the image.
    bootstrap = "\n".join(_bootstrap_command("-"))
    parts = {
        "packages": packages.encode(),
        "recipe": recipe("base"),
        "bootstrap": bootstrap.encode(),
    }
    return f"testbed/base:{digest(parts)}"


def _runtime_tag(kind: str, target: Target) -> str:
    packages = requirements(kind, target)
    lines = [f"{name}{specifier}" for name, specifier in packages.items()]
    parts = {
        "base": _base_tag().encode(),
        "recipe": recipe("runtime"),
        "packages": "\n".join(lines).encode(),
    }
    return f"testbed/runtime:{digest(parts)}"


def _code_tag(kind: str, code: Mapping[str, bytes], runtime: str) -> str:
    # The tag of the layer below stands for everything in it.
    parts = {"runtime": runtime.encode(), "recipe": recipe(kind)}
    for name, content in code.items():
        parts[f"code/{name}"] = content
    return f"testbed/{kind}:{digest(parts)}"


def ensure_images(client: docker.DockerClient, say: Say) -> ImageTags:
    """Return the tags of existing images, after building missing ones.

    Raises HostError with the reason and a remedy if an image cannot be built.
    """
    # Read the code once, so that the tags match the files in the images even if a file is saved during the build.
    code = _files_by_kind()
    choices = [_tags_for(code, target) for target in _targets(client)]
    tags = _choose(client, choices)
    if image_exists(client, tags.device) and image_exists(client, tags.shaper):
        return tags
    with build_lock():
        # Another command may have built the images while this one waited for the lock.
        tags = _choose(client, choices)
        has_device = image_exists(client, tags.device)
        # Torch has to be fetched only if no image has it.
        if not has_device and not image_exists(client, tags.device_runtime):
            tags = _obtain_torch(choices, say)
        for kind, files in code.items():
            _ensure_image(client, kind, files, tags.target, say)
        remove_images(client, keep=tags, spare=SPARE)
    return tags


def _obtain_torch(choices: Sequence[ImageTags], say: Say) -> ImageTags:
    """Return the tags of the preferred torch build if pip can fetch the build, otherwise of the second build."""
    preferred = choices[0]
    if len(choices) == 1 or fetch_cpu_torch(preferred.target, say):
        return preferred
    return choices[1]


def ensure_agent(client: docker.DockerClient, say: Say) -> str:
    """Return the tag of the agent's image, from which `images/program.Dockerfile` copies the agent."""
    return _ensure_image(
        client, "agent", _code_files("agent"), _targets(client)[0], say
    )


def _ensure_image(
    client: docker.DockerClient,
    kind: str,
    code: Mapping[str, bytes],
    target: Target,
    say: Say,
) -> str:
    """Return the tag of an image with our code, after building missing layers."""
    runtime = _runtime_tag(kind, target)
    base = _base_tag()
    tag = _code_tag(kind, code, runtime)
    if image_exists(client, tag):
        return tag
    if not image_exists(client, runtime):
        if not image_exists(client, base):
            _make_base(client, base, say)
        say(f"building the {kind}'s Python packages into {runtime}")
        _build_runtime(client, kind, base, runtime, target)
    say(f"building {tag}")
    files = {f"code/{name}": content for name, content in code.items()}
    build(client, tag, recipe(kind), files, {"RUNTIME": runtime}, {LABEL: kind})
    return tag


def remove_images(
    client: docker.DockerClient,
    keep: ImageTags | None = None,
    spare: Mapping[str, int] | None = None,
) -> list[str]:
    """Remove the testbed's images except ``keep`` and the newest ``spare`` of each kind; return removed tags.

    Without ``spare``, only ``keep`` stays.
    """
    keep_tags = set() if keep is None else set(keep.by_kind.values())
    spare = spare or {}
    removed: list[str] = []
    for kind in SPARE:
        newest_first = _images_of(client, kind)
        for image in newest_first[spare.get(kind, 0) :]:
            for reference in image.tags or [str(image.id)]:
                if reference not in keep_tags and _remove_image(client, reference):
                    removed.append(reference)
    return removed


def _images_of(client: docker.DockerClient, kind: str) -> list[Image]:
    """Return the testbed's images of a kind, newest first; for stages, only abandoned ones."""
    images = client.images.list(filters={"label": f"{LABEL}={kind}"})
    selected = [image for image in images if _is_removable(image, kind)]
    # UTC timestamps in one format sort correctly as strings.
    return sorted(selected, key=lambda image: str(image.attrs["Created"]), reverse=True)


def _is_removable(image: Image, kind: str) -> bool:
    """Return whether an image with the label of a kind is the testbed's own, or an abandoned stage."""
    if kind == "stage":
        return _is_abandoned(image)
    # Images that users build on ours inherit the label, but have other names.
    prefix = f"testbed/{kind}:"
    return any(tag.startswith(prefix) for tag in image.tags)


def _is_abandoned(stage: Image) -> bool:
    """Return whether no build, even by another user of this engine, can still need a stage."""
    # Without the fraction: engines print nanoseconds, of which Python 3.11 reads six digits.
    seconds = str(stage.attrs["Created"])[:19]
    created = datetime.fromisoformat(seconds).replace(tzinfo=UTC)
    return (datetime.now(UTC) - created).total_seconds() > _ABANDONED_AFTER


def _remove_image(client: docker.DockerClient, reference: str) -> bool:
    """Remove one unused image and return True; return False for a missing image, or one in use."""
    try:
        client.images.remove(reference)
    except ImageNotFound:
        return False
    except APIError as error:
        # Conflict: the image is in use.
        if error.status_code == 409:
            return False
        raise
    return True


# Content


def digest(parts: Mapping[str, bytes]) -> str:
    """Return a short hash of named contents, independent of their order.

    >>> digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    True
    """
    checksum = hashlib.sha256()
    for name in sorted(parts):
        for piece in (name.encode(), parts[name]):
            # With lengths, so that no content can imitate the beginning of another part.
            checksum.update(len(piece).to_bytes(8, "big") + piece)
    return checksum.hexdigest()[:16]


def recipe(kind: str) -> bytes:
    """Return the Dockerfile of a kind of image."""
    return (RECIPES / f"{kind}.Dockerfile").read_bytes()


def _base_packages() -> list[str]:
    common = read_list(RECIPES / "base.packages")
    return sorted({*common, *read_list(RECIPES / "shaper.packages")})


def _code_files(kind: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for part in CODE[kind]:
        # testbed_controller/shaping: the package testbed_controller, and a path in its folder.
        package, _, subpath = part.partition("/")
        folder = package_folder(package)
        root = folder / subpath
        paths = [root] if root.is_file() else sorted(root.rglob("*"))
        for path in paths:
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            if _is_source(path) and not name.startswith(HOST_ONLY):
                files[name] = path.read_bytes()
    return files


def _is_source(path: Path) -> bool:
    is_hidden = path.name.startswith(".")
    return path.is_file() and path.suffix != ".pyc" and not is_hidden


# Base image


def _make_base(client: docker.DockerClient, tag: str, say: Say) -> None:
    failure = _base_from_registry(client, tag, say)
    if failure:
        say(f"no base image from a registry ({failure}): making one with mmdebstrap")
        _base_from_mmdebstrap(client, tag, say)


def _base_from_registry(client: docker.DockerClient, tag: str, say: Say) -> str:
    """Build the base from the official Python image; return the reason of a failure, or an empty string."""
    pull = partial(client.images.pull, REGISTRY_BASE)
    failure = describe_refusal_within(PULL_TIMEOUT, pull)
    if failure:
        return failure
    say(f"building {tag} on {REGISTRY_BASE}")
    # The image has another Python than Debian's.
    packages = [name for name in _base_packages() if name != "python3"]
    arguments = {"PACKAGES": " ".join(packages)}
    labels = {LABEL: "base", "testbed.source": REGISTRY_BASE}
    try:
        build(client, tag, recipe("base"), {}, arguments, labels, allow_network=True)
    except HostError as error:
        return str(error)
    return ""


def _bootstrap_command(target: str) -> list[str]:
    command = ["mmdebstrap", "--quiet", "--variant=minbase"]
    command.append("--include=" + ",".join(_base_packages()))
    # Without manuals and translations, to keep the image small.
    for name in ("man", "doc", "locale", "info"):
        command.append(f"--dpkgopt=path-exclude=/usr/share/{name}/*")
    return [*command, "bookworm", target]


def _base_from_mmdebstrap(client: docker.DockerClient, tag: str, say: Say) -> None:
    if shutil.which("mmdebstrap") is None:
        if os.geteuid() != 0:
            raise HostError(
                "no base image: no container registry responds and mmdebstrap is not installed; run "
                "'sudo apt-get install mmdebstrap' and try again"
            )
        install_packages(
            ["mmdebstrap"], say, why="the base image is made with mmdebstrap"
        )
    say(
        f"making {tag} with mmdebstrap: Debian 12, Python {PYTHON}, {len(_base_packages())} packages"
    )
    with tempfile.TemporaryDirectory(prefix="testbed-base-") as folder:
        archive = Path(folder) / "base.tar"
        command = _bootstrap_command(str(archive))
        result = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        if result.returncode:
            raise HostError(_explain_bootstrap_failure(result.stderr, command))
        labelled = [f"LABEL {LABEL}=base testbed.source=mmdebstrap"]
        try:
            # Podman accepts the tag only as part of the repository.
            client.api.import_image_from_file(
                str(archive), repository=tag, changes=labelled
            )
        except APIError as error:
            raise HostError(
                f"the engine refused the base image: {_summarise_error(error)}"
            ) from error


def _explain_bootstrap_failure(errors: str, command: Sequence[str]) -> str:
    folder = Path(tempfile.gettempdir())
    disk_message = describe_full_disk(errors, folder, _BOOTSTRAP_SPACE)
    if disk_message:
        return f"mmdebstrap failed: {disk_message}"
    complaints = [line for line in errors.splitlines() if line.startswith("E:")]
    first = complaints[0] if complaints else "no reason given"
    # The last argument is a temporary file.
    manual = shlex.join([*command[:-1], "base.tar"])
    return f"mmdebstrap failed: {first}; run '{manual}' to see all messages"


# Runtime image


def _build_runtime(
    client: docker.DockerClient, kind: str, base: str, tag: str, target: Target
) -> None:
    files: dict[str, bytes | Path] = {}
    for path in fetch_wheels(requirements(kind, target), target):
        files[f"wheels/{path.name}"] = path
    # The build ends by importing these modules, so that a package which lacks a shared library fails now, not in a run.
    # In the lists of packages, each module is named like its package.
    modules = sorted(name.replace("-", "_") for name in list_packages(kind))
    arguments = {"BASE": base, "MODULES": ", ".join(modules)}
    labels = {LABEL: "runtime", "testbed.runtime": kind}
    build(client, tag, recipe("runtime"), files, arguments, labels)


# Builder


def build(
    client: docker.DockerClient,
    tag: str,
    dockerfile: bytes,
    files: Mapping[str, bytes | Path],
    arguments: dict[str, str],
    labels: dict[str, str],
    *,
    allow_network: bool = False,
) -> None:
    """Build one image from a temporary context, by default without network access; raises `HostError`.

    Only a build with network access, which fetches packages, uses the proxies of the user's Docker configuration.
    """
    # Avoid the temporary folder, which is often in memory: the wheels of torch may take gigabytes.
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=BUILD) as context:
        try:
            with tarfile.open(fileobj=context, mode="w") as archive:
                for name, content in {"Dockerfile": dockerfile, **files}.items():
                    _add_file(archive, name, content)
        except OSError as error:
            raise HostError(
                f"cannot build the image {tag}: {BUILD}: {error.strerror or error}"
            ) from error
        context.seek(0)
        # The Dockerfiles label their intermediate stage with this random value.
        stage = secrets.token_hex(8)
        try:
            client.images.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                buildargs={**arguments, "STAGE": stage},
                labels=labels,
                network_mode=None if allow_network else "none",
                use_config_proxy=allow_network,
                rm=True,
                forcerm=True,
            )
        except (BuildError, APIError) as error:
            raise HostError(
                f"cannot build the image {tag}: {_summarise_error(error)}"
            ) from error
        finally:
            # The builder keeps the stage that holds the wheels, although it is never used again: an image with the same
            # tag is never rebuilt.
            filters = {"label": f"testbed.stage={stage}", "dangling": True}
            for image in client.images.list(filters=filters):
                _remove_image(client, str(image.id))


def _add_file(archive: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    """Add one file without metadata of the host, so that equal content gives equal layers."""
    # Time and owner stay 0, the defaults of `TarInfo`.
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(content, Path):
        entry.size = content.stat().st_size
        with content.open("rb") as source:
            archive.addfile(entry, source)
    else:
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def _summarise_error(error: BaseException) -> str:
    """Return one line with the engine's reason."""
    if isinstance(error, BuildError):
        output = ""
        for entry in error.build_log:
            if isinstance(entry, dict):
                output += str(entry.get("stream", ""))
        lines = []
        for line in output.splitlines():
            if line.strip() and not line.startswith(("Step", " --->")):
                lines.append(line)
        # The last lines are those of the failed command.
        return " / ".join([str(error.msg), *lines[-2:]])
    text = str(getattr(error, "explanation", None) or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def image_exists(client: docker.DockerClient, tag: str) -> bool:
    """Return whether the engine has an image."""
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def image_size(client: docker.DockerClient, tag: str) -> int:
    """Return the disk space of an image on the engine, in bytes."""
    # With a containerd image store, inspecting reports compressed layers, and listing reports the stored size.
    return int(client.api.images(name=tag)[0]["Size"])


def image_folder(info: Mapping[str, Any]) -> Path:
    """Return the image folder of an engine, given the engine's info.

    >>> image_folder({"DockerRootDir": "/data/docker"})
    PosixPath('/data/docker')
    """
    # A list of pairs.
    status = dict(info.get("DriverStatus") or ())
    uses_containerd = status.get("driver-type", "").startswith(
        "io.containerd.snapshotter"
    )
    socket = str((info.get("Containerd") or {}).get("Address", ""))
    if uses_containerd and socket in _SYSTEM_CONTAINERD:
        return Path("/var/lib/containerd")
    return Path(str(info.get("DockerRootDir") or "/var/lib/docker"))


@contextmanager
def build_lock() -> Iterator[None]:
    """Prevent concurrent builds of the same image by two commands."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

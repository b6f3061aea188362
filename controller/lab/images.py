"""The images of devices and shaper: what goes into them, their tags, how they are built and found again.

Each image is tagged with a hash of all that goes into it, so an image that exists is right and nothing is
built twice. They stand on each other: ``base`` (Debian and Python), ``runtime`` (Python packages, one each for device
and shaper), and on top the project's code as a thin layer that a change of code rebuilds within seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import docker
from docker.errors import APIError, BuildError, ImageNotFound

from controller.lab.engine import Say, install_packages, refusal_within
from controller.lab.paths import BUILD, RECIPES, ROOT
from testbed.common.errors import HostError

PYTHON = "3.11"
"""Python of every image, whichever the controller runs on: that of Debian 12."""
REGISTRY_BASE = f"python:{PYTHON}-slim-bookworm"
PULL_PATIENCE = 60.0
LABEL = "testbed.image"

CODE = {
    "device": ("testbed", "agent"),
    "shaper": (
        "testbed",
        "controller/__init__.py",
        "controller/shaping",
        "controller/hosts/__init__.py",
        "controller/hosts/inside",
    ),
    "agent": ("testbed", "agent"),
}
"""What of the code each image carries."""
HOSTS = ("testbed/scenario/", "testbed/simulation/", "testbed/prepare.py", "testbed/validation.py")
"""What no image carries of that: scenarios are read, planned and simulated on the host."""

REQUIREMENTS = {"device": ("agent", "device"), "shaper": ("shaper",), "agent": ("agent",)}
"""Which lists of Python packages each image has."""

SPARE = {"program": 4, "packages": 4, "device": 8, "shaper": 8, "agent": 2, "runtime": 4, "base": 2, "stage": 0}
"""How many images of each kind stay when others are built, so that going back to another version is quick."""


@dataclass(frozen=True)
class ImageTags:
    """The tags that the present code needs."""

    base: str
    device_runtime: str
    shaper_runtime: str
    device: str
    shaper: str


def names() -> ImageTags:
    """Return the tags for the files as they are now; needs no engine."""
    return _names({kind: _code_files(kind) for kind in ("device", "shaper")})


def _names(code: Mapping[str, Mapping[str, bytes]]) -> ImageTags:
    runtimes = {kind: _runtime_name(kind) for kind in code}
    tags = {kind: _code_name(kind, files, runtimes[kind]) for kind, files in code.items()}
    return ImageTags(_base_name(), runtimes["device"], runtimes["shaper"], tags["device"], tags["shaper"])


def _base_name() -> str:
    packages, bootstrap = "\n".join(_base_packages()), "\n".join(_bootstrap_command("-"))
    parts = {"packages": packages.encode(), "recipe": recipe("base"), "bootstrap": bootstrap.encode()}
    return f"testbed/base:{digest(parts)}"


def _runtime_name(kind: str) -> str:
    packages = "\n".join(f"{name}=={version}" for name, version in requirements(kind).items())
    parts = {"base": _base_name().encode(), "recipe": recipe("runtime"), "packages": packages.encode()}
    return f"testbed/runtime:{digest(parts)}"


def _code_name(kind: str, code: Mapping[str, bytes], runtime: str) -> str:
    files = {f"code/{name}": content for name, content in code.items()}
    return f"testbed/{kind}:{digest({'runtime': runtime.encode(), 'recipe': recipe(kind), **files})}"


def ensure_images(client: docker.DockerClient, say: Say) -> ImageTags:
    """Return the tags of images that exist, building what does not.

    Raises HostError where an image cannot be had; says what failed and what would help.
    """
    # Read once: a file that is saved meanwhile must not end up under the hash of what it was.
    code = {kind: _code_files(kind) for kind in ("device", "shaper")}
    wanted = _names(code)
    if exists(client, wanted.device) and exists(client, wanted.shaper):
        return wanted
    with one_at_a_time():
        for kind, files in code.items():
            _ensure_image(client, kind, files, say)
        remove_images(client, keep=wanted, spare=SPARE)
    return wanted


def ensure_agent(client: docker.DockerClient, say: Say) -> str:
    """Return the tag of the image of the agent alone, which `images/program.Dockerfile` puts beside a user's."""
    return _ensure_image(client, "agent", _code_files("agent"), say)


def _ensure_image(client: docker.DockerClient, kind: str, code: Mapping[str, bytes], say: Say) -> str:
    """Return the tag of an image with our code; build it, and what it stands on, where it is missing."""
    runtime, base = _runtime_name(kind), _base_name()
    tag = _code_name(kind, code, runtime)
    if exists(client, tag):
        return tag
    if not exists(client, runtime):
        if not exists(client, base):
            _make_base(client, base, say)
        say(f"building the {kind}'s Python packages into {runtime}")
        _build_runtime(client, kind, base, runtime)
    say(f"building {tag}")
    files = {f"code/{name}": content for name, content in code.items()}
    build(client, tag, recipe(kind), files, {"RUNTIME": runtime}, {LABEL: kind})
    return tag


def remove_images(
    client: docker.DockerClient, keep: ImageTags | None = None, spare: Mapping[str, int] | None = None
) -> list[str]:
    """Remove the testbed's images but those to keep, and of each kind a number of the newest; return what went."""
    kept = set() if keep is None else set(vars(keep).values())
    gone: list[str] = []
    for kind in SPARE:
        found = client.images.list(filters={"label": f"{LABEL}={kind}"})
        # What somebody builds on one of ours inherits the label; it is theirs, and so is its name.
        ours = [
            image for image in found if kind == "stage" or any(tag.startswith(f"testbed/{kind}:") for tag in image.tags)
        ]
        ours.sort(key=lambda image: str(image.attrs["Created"]), reverse=True)
        for image in ours[(spare or {}).get(kind, 0) :]:
            for reference in image.tags or [str(image.id)]:
                if reference not in kept and _remove(client, reference):
                    gone.append(reference)
    return gone


def _remove(client: docker.DockerClient, reference: str) -> bool:
    """Remove one image; leave one that a container uses, or that another image stands on."""
    try:
        client.images.remove(reference)
    except ImageNotFound:
        return False
    except APIError as error:
        if error.status_code == 409:
            return False
        raise
    return True


# What goes in


def digest(parts: Mapping[str, bytes]) -> str:
    """Return a short hash of named contents, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for piece in (name.encode(), parts[name]):
            digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()[:16]


def recipe(kind: str) -> bytes:
    """Return the Dockerfile of a kind of image."""
    return (RECIPES / f"{kind}.Dockerfile").read_bytes()


def listed(path: Path) -> list[str]:
    """Return the names in a file with one a line, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _base_packages() -> list[str]:
    return sorted({*listed(RECIPES / "base.packages"), *listed(RECIPES / "shaper.packages")})


def _code_files(kind: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for part in CODE[kind]:
        root = ROOT / part
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if (
                path.is_file()
                and path.suffix != ".pyc"
                and not path.name.startswith(".")
                and not name.startswith(HOSTS)
            ):
                files[name] = path.read_bytes()
    return files


def requirements(kind: str) -> dict[str, str]:
    """Return name -> version of an image's Python packages and all that they need, as installed here.

    The host's environment is made from ``requirements.lock``, so host and devices compute with the same versions.
    Raises `HostError` where one is not installed here.
    """
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    lists = [RECIPES / f"{name}.requirements" for name in REQUIREMENTS[kind]]
    waiting = [Requirement(line) for path in lists for line in listed(path)]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            raise HostError(
                f"the Python package '{requirement.name}' of {RECIPES.name}/{kind}.requirements is not installed: "
                "install it by pip, or in a checkout add it to requirements.lock and run 'make'"
            ) from None
        found[name] = distribution.version
        waiting += [Requirement(line) for line in distribution.requires or ()]
    return dict(sorted(found.items()))


# Base image


def _make_base(client: docker.DockerClient, tag: str, say: Say) -> None:
    refusal = _base_from_registry(client, tag, say)
    if refusal:
        say(f"no base image from a registry ({refusal}): making one with mmdebstrap")
        _base_from_mmdebstrap(client, tag, say)


def _base_from_registry(client: docker.DockerClient, tag: str, say: Say) -> str:
    """Build the base on the official Python image; return why that is not possible, or an empty text."""
    if refusal := refusal_within(PULL_PATIENCE, lambda: client.images.pull(REGISTRY_BASE)):
        return refusal
    say(f"building {tag} on {REGISTRY_BASE}")
    arguments = {"PACKAGES": " ".join(name for name in _base_packages() if name != "python3")}
    try:
        build(
            client,
            tag,
            recipe("base"),
            {},
            arguments,
            {LABEL: "base", "testbed.source": REGISTRY_BASE},
            network=None,
        )
    except HostError as error:
        return str(error)
    return ""


def _bootstrap_command(target: str) -> list[str]:
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale", "info")]
    include = "--include=" + ",".join(_base_packages())
    return ["mmdebstrap", "--quiet", "--variant=minbase", include, *excluded, "bookworm", target]


def _base_from_mmdebstrap(client: docker.DockerClient, tag: str, say: Say) -> None:
    if shutil.which("mmdebstrap") is None:
        if os.geteuid() != 0:
            raise HostError(
                "no base image: no container registry answers and mmdebstrap is not installed; run "
                "'sudo apt-get install mmdebstrap' and try again"
            )
        install_packages(["mmdebstrap"], say, why="the base image is made with mmdebstrap")
    say(f"making {tag} with mmdebstrap: Debian 12, Python {PYTHON}, {len(_base_packages())} packages")
    with tempfile.TemporaryDirectory(prefix="testbed-base-") as folder:
        archive = Path(folder) / "base.tar"
        command = _bootstrap_command(str(archive))
        done = subprocess.run(command, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, text=True)
        if done.returncode:
            complaints = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["no word of why"]
            raise HostError(f"mmdebstrap failed: {complaints[0]}; run '{' '.join(command[:3])} ... bookworm' by hand")
        labelled = [f"LABEL {LABEL}=base testbed.source=mmdebstrap"]
        try:  # the repository with its tag, since Podman takes no tag beside it
            client.api.import_image_from_file(str(archive), repository=tag, changes=labelled)
        except APIError as error:
            raise HostError(f"the engine does not take the base image: {_reason(error)}") from error


# Runtime image


def _build_runtime(client: docker.DockerClient, kind: str, base: str, tag: str) -> None:
    wheels = fetch_wheels(requirements(kind))
    build(
        client,
        tag,
        recipe("runtime"),
        {f"wheels/{path.name}": path for path in wheels},
        {"BASE": base},
        {LABEL: "runtime", "testbed.runtime": kind},
    )
    # The builder keeps the stage that held the wheels as a cache; the hash in the tag makes that useless.
    for image in client.images.list(filters={"label": f"{LABEL}=stage", "dangling": True}):
        _remove(client, str(image.id))


def fetch_wheels(versions: Mapping[str, str]) -> list[Path]:
    """Return a wheel of each package and of pip itself from the cache, fetched by the host's pip where missing.

    Raises `HostError` where pip cannot fetch them.
    """
    folder = BUILD / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {**versions, "pip": pip_version()}
    missing = [f"{name}=={version}" for name, version in wanted.items() if _wheel(folder, name, version) is None]
    if missing and (complaint := pip_wheels(folder, "--no-deps", *missing)):
        raise HostError(f"pip cannot fetch the wheels for the images: {complaint}; check pip's configuration")
    found = {name: _wheel(folder, name, version) for name, version in wanted.items()}
    lost = [name for name, path in found.items() if path is None]
    if lost:
        raise HostError(f"pip made no wheel of {', '.join(lost)}: remove {folder} and try again")
    return [path for path in found.values() if path is not None]


def pip_version() -> str:
    """Return the version of the host's pip; raises HostError where this environment has none."""
    try:
        return metadata.version("pip")
    except metadata.PackageNotFoundError:
        text = f"images are made of wheels that pip fetches, and there is none here: '{sys.executable} -m ensurepip'"
        raise HostError(text) from None


def pip_wheels(folder: Path, *arguments: str) -> str:
    """Let the host's pip write wheels for the images' Python into a folder; return its complaint, empty if none.

    Packages that come as source alone can be built only where the host has that Python, too.
    """
    command = ["wheel", "--wheel-dir", str(folder)]
    if platform.python_version_tuple()[:2] != tuple(PYTHON.split(".")):
        command = ["download", "--only-binary", ":all:", "--python-version", PYTHON, "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-200:]]
    return lines[0] if done.returncode else ""


def _wheel(folder: Path, name: str, version: str) -> Path | None:
    """Find the wheel of one package and version, whatever way its name is spelt."""
    for path in folder.glob("*.whl"):
        stem, found, *_ = path.name.split("-")
        if re.sub(r"[-_.]+", "-", stem).lower() == name and found == version:
            return path
    return None


# Builder


def build(
    client: docker.DockerClient,
    tag: str,
    recipe: bytes,
    files: Mapping[str, bytes | Path],
    arguments: dict[str, str],
    labels: dict[str, str],
    network: str | None = "none",
) -> None:
    """Build one image from a context made here, without a network unless asked for one; raises `HostError`."""
    with tempfile.TemporaryFile() as context:
        with tarfile.open(fileobj=context, mode="w") as archive:
            for name, content in {"Dockerfile": recipe, **files}.items():
                _add(archive, name, content)
        context.seek(0)
        try:
            client.images.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                buildargs=arguments,
                labels=labels,
                network_mode=network,
                rm=True,
                forcerm=True,
            )
        except (BuildError, APIError) as error:
            raise HostError(f"the image {tag} cannot be built: {_reason(error)}") from error


def _add(archive: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    """Add one file with nothing of the host's in its entry, so that equal content gives equal layers."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(content, Path):
        entry.size = content.stat().st_size
        with content.open("rb") as source:
            archive.addfile(entry, source)
    else:
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def _reason(error: BaseException) -> str:
    """Return one line of why the engine refused."""
    if isinstance(error, BuildError):
        output = "".join(str(line.get("stream", "")) for line in error.build_log if isinstance(line, dict))
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith(("Step", " --->"))]
        return " / ".join([str(error.msg), *lines[-2:]])
    text = str(getattr(error, "explanation", None) or error)
    return text.strip().splitlines()[-1] if text.strip() else type(error).__name__


def exists(client: docker.DockerClient, tag: str) -> bool:
    """Say whether the engine has an image."""
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep two commands from building the same image at once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

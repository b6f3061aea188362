"""Python packages of the images: selection, versions, builds, and wheels.

Packages are resolved for the Python and platform of the images, independent of the controller's own.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging import tags
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version

from testbed.common import formats
from testbed.common.errors import HostError
from testbed_controller.lab.engine import Say
from testbed_controller.lab.paths import BUILD, RECIPES

PYTHON = "3.11"
"""Python version of every image, that of Debian 12, independent of the controller's."""
_GLIBC = 36
"""Minor version of glibc in Debian 12."""
REQUIREMENTS = {
    "device": ("agent", "device"),
    "shaper": ("shaper",),
    "agent": ("agent",),
}
"""Package lists of each image."""
_FULL = 20 << 20
"""A disk with less free space, in bytes, counts as full."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """The platform of an image, which determines the Python packages.

    >>> Target("aarch64", "2.13.0+cpu").environment["platform_machine"]
    'aarch64'
    """

    machine: str
    """Processor architecture, by Linux's name."""
    torch: str
    """Version of torch with its build, such as 2.13.0+cpu."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables of environment markers."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{PYTHON}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{PYTHON}.0",
            "python_version": PYTHON,
            "sys_platform": "linux",
        }

    @property
    def platforms(self) -> list[str]:
        """The platform tags of compatible wheels, the closest one first."""
        # PEP 600: a wheel for an older glibc runs with every newer one. The oldest tag in use is that of glibc 2.5.
        names = [f"manylinux_2_{minor}" for minor in range(_GLIBC, 4, -1)]
        # Names from before PEP 600, under which many wheels are still published.
        names += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        return [f"{name}_{self.machine}" for name in names]

    def supported_tags(self) -> set[tags.Tag]:
        """Return the tags of all compatible wheels."""
        version = tuple(int(part) for part in PYTHON.split("."))
        own = tags.cpython_tags(version, platforms=self.platforms)
        pure = tags.compatible_tags(
            version, f"cp{version[0]}{version[1]}", self.platforms
        )
        return {*own, *pure}

    def is_this_machine(self) -> bool:
        """Return whether wheels that pip builds or selects for this process fit the image."""
        library, version = platform.libc_ver()
        major, _, minor = version.partition(".")
        # A program may use an older glibc than the one of its system, never a newer one.
        is_old_enough = library == "glibc" and major == "2"
        is_old_enough = is_old_enough and int(minor or _GLIBC + 1) <= _GLIBC
        same_python = platform.python_version_tuple()[:2] == tuple(PYTHON.split("."))
        return is_old_enough and same_python and host_machine() == self.machine


def host_machine() -> str:
    """Return the machine's processor architecture, by Linux's name."""
    return machine_name(platform.machine())


def machine_name(architecture: str) -> str:
    """Return Linux's name of a processor architecture.

    >>> machine_name("amd64"), machine_name("aarch64")
    ('x86_64', 'aarch64')
    """
    return _MACHINES.get(architecture.lower(), architecture)


def torch_builds() -> tuple[str, ...]:
    """Return the allowed builds of torch for the device image, the preferred one first.

    The version is that of this environment. The CPU build comes first because it has a tenth of the size; the build of
    this environment is the alternative, and the only choice with TESTBED_TORCH=cuda. Raises `HostError` if torch is
    missing or TESTBED_TORCH is invalid.
    """
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise HostError(
            "the Python package 'torch' is not installed: install it with pip, or run 'make'"
        ) from None
    wish = os.environ.get("TESTBED_TORCH") or "cpu"
    if wish not in ("cpu", "cuda"):
        raise HostError(f"unknown TESTBED_TORCH={wish}: set it to cpu or cuda")
    if wish == "cuda" or installed.endswith("+cpu"):
        return (installed,)
    return (installed.partition("+")[0] + "+cpu", installed)


def fetch_cpu_torch(target: Target, say: Say) -> bool:
    """Fetch the CPU build of torch for an image; return whether a package index provides the build."""
    folder = _wheel_folder()
    wanted = Requirement(f"torch=={target.torch}")
    if _find_wheel(folder, wanted, target.supported_tags()) is not None:
        return True
    say(
        f"fetching torch {target.torch} for the images; TESTBED_TORCH=cuda takes the CUDA build"
    )
    script = str(RECIPES / "cpu-torch")
    pip = _pip_command(folder, target)
    command = ["sh", script, target.torch, *pip, "--no-deps"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        say(done.stdout.strip())
    return done.returncode == 0


def requirements(kind: str, target: Target) -> dict[str, str]:
    """Return the Python packages of an image with all dependencies: name -> version specifier.

    The result equals pip's: with extras and markers, for the image's Python and platform. Versions are those of this
    environment, which is made from ``requirements.lock``, so host and devices compute with equal ones. A package needed
    only on the image's platform keeps the specifier of its requirement. Raises `HostError` if a listed package is not
    installed here.
    """
    packages: dict[str, str] = {}
    absent: dict[str, Requirement] = {}
    # Pairs of package and extra whose dependencies are known, since dependencies may form a cycle.
    expanded: set[tuple[str, str]] = set()
    listed = [Requirement(name) for name in list_packages(kind)]
    waiting = list(listed)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            if requirement in listed:
                raise HostError(
                    f"the Python package '{requirement.name}' of {RECIPES.name}/{kind}.requirements is not "
                    "installed: install it with pip, or in a checkout add it to requirements.lock and run 'make'"
                ) from None
            known = absent.setdefault(name, Requirement(name))
            known.extras |= requirement.extras
            known.specifier &= requirement.specifier
            packages[name] = str(known).removeprefix(name)
            continue
        environment = target.environment
        packages[name] = f"=={distribution.version}"
        if name == "torch":
            packages[name] = _pin_torch(target.torch)
            if target.torch.endswith("+cpu"):
                # The CUDA packages of other builds are marked as needed on Linux.
                environment["platform_system"] = ""
        lines = distribution.requires or ()
        for extra in ("", *requirement.extras):
            if (name, extra) not in expanded:
                expanded.add((name, extra))
                waiting += _filter_requirements(lines, {**environment, "extra": extra})
    return dict(sorted(packages.items()))


def _pin_torch(version: str) -> str:
    # "==2.13.0" would also accept 2.13.0+cpu.
    return f"=={version}" if "+" in version else f"==={version}"


def _filter_requirements(
    lines: Iterable[str], environment: Mapping[str, str]
) -> list[Requirement]:
    needed = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            needed.append(requirement)
    return needed


def list_packages(kind: str) -> list[str]:
    """Return the directly imported packages of an image: required ones, and installed extras."""
    names = []
    for group in REQUIREMENTS[kind]:
        names += read_list(RECIPES / f"{group}.requirements")
    extras = RECIPES / f"{kind}.extras"
    if extras.exists():
        names += [name for name in read_list(extras) if _is_installed(name)]
    return names


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def read_list(path: Path) -> list[str]:
    """Return the names in a file with one name per line, without comments; ``#`` begins a comment."""
    names = []
    for line in path.read_text().splitlines():
        name = line.partition("#")[0].strip()
        if name:
            names.append(name)
    return names


# Wheels


def fetch_wheels(packages: Mapping[str, str], target: Target) -> list[Path]:
    """Return a wheel of each package and of pip itself, from the cache or fetched by the host's pip.

    Raises `HostError` if pip fails.
    """
    wanted = {**packages, "pip": f"=={pip_version()}"}
    roots = [Requirement(name + specifier) for name, specifier in wanted.items()]
    return complete_wheels(_wheel_folder(), roots, target)


def complete_wheels(
    folder: Path, roots: Iterable[Requirement], target: Target
) -> list[Path]:
    """Return wheels for some packages and all dependencies from a folder, after fetching missing ones.

    pip evaluates markers for the host, so dependencies specific to the image are resolved here, from the metadata of
    the wheels. Raises `HostError` if pip fails.
    """
    pinned = {canonicalize_name(root.name): root for root in roots}
    tried: set[str] = set()
    # Each pass reads the requirements of the wheels that the pass before has fetched.
    while True:
        wheels, missing = _walk_wheels(folder, pinned, target)
        if not missing:
            return sorted(wheels.values())
        lost = tried.intersection(missing)
        if lost:
            raise HostError(
                f"pip made no wheel of {', '.join(sorted(lost))}: remove {folder} and try again"
            )
        tried.update(missing)
        complaint = pip_wheels(folder, target, "--no-deps", *sorted(missing))
        if complaint:
            raise HostError(f"pip cannot fetch the wheels for the images: {complaint}")


def fetch_program_wheels(
    folder: Path, packages: Sequence[str], target: Target, say: Say
) -> list[Path]:
    """Return wheels for a program's packages, their dependencies beyond the device image, and pip.

    The packages share the device image's torch unless they name another version. Raises `HostError` if pip fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = requirements("device", target)
    roots = _parse_requirements(packages)
    arguments = [*packages, f"pip=={pip_version()}"]
    if "torch" not in [canonicalize_name(root.name) for root in roots]:
        if target.torch.endswith("+cpu"):
            fetch_cpu_torch(target, say)
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch{present['torch']}\n")
        arguments += ["--constraint", str(constraints)]
        arguments += ["--find-links", str(_wheel_folder())]
    complaint = pip_wheels(folder, target, *arguments)
    if complaint:
        raise HostError(
            f"pip cannot fetch {', '.join(packages)}: {complaint}; check the names of the packages"
        )
    if not target.is_this_machine():
        complete_wheels(folder, roots, target)
    wheels = sorted(folder.glob("*.whl"))
    return [path for path in wheels if not _is_present(path, present)]


def _parse_requirements(packages: Iterable[str]) -> list[Requirement]:
    """Return the packages that have a name; paths and addresses, which pip accepts too, have none."""
    named = []
    for text in packages:
        with suppress(InvalidRequirement):
            named.append(Requirement(text))
    return named


def _is_present(path: Path, present: Mapping[str, str]) -> bool:
    """Return whether the device image has the package of a wheel in the same version."""
    name, version, _, _ = parse_wheel_filename(path.name)
    return present.get(name, "").lstrip("=") == str(version)


def _walk_wheels(
    folder: Path, pinned: Mapping[NormalizedName, Requirement], target: Target
) -> tuple[dict[str, Path], set[str]]:
    """Return the wheels in a folder by package, and the requirements without a wheel."""
    supported = target.supported_tags()
    wheels: dict[str, Path] = {}
    missing: set[str] = set()
    expanded: set[tuple[str, str]] = set()
    waiting = list(pinned.values())
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = ("", *requirement.extras)
        requirement = pinned.get(name, requirement)
        path = wheels.get(name) or _find_wheel(folder, requirement, supported)
        if path is None:
            missing.add(f"{name}{requirement.specifier}")
            continue
        wheels[name] = path
        for extra in extras:
            if (name, extra) not in expanded:
                expanded.add((name, extra))
                environment = {**target.environment, "extra": extra}
                lines = _wheel_requirements(path)
                waiting += _filter_requirements(lines, environment)
    return wheels, missing


def _wheel_requirements(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            # At the top: setuptools carries the metadata of other packages further down.
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                folder = zipfile.Path(archive, name.removesuffix("METADATA"))
                return metadata.PathDistribution(folder).requires or []
    raise HostError(f"{path} has no metadata: remove the file and try again")


def _find_wheel(
    folder: Path, requirement: Requirement, supported: set[tags.Tag]
) -> Path | None:
    """Return the newest wheel in a folder with a matching requirement and platform."""
    wheels: dict[Version, Path] = {}
    wanted = canonicalize_name(requirement.name)
    for path in folder.glob("*.whl"):
        try:
            name, version, _, wheel_tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if name != wanted or not supported & wheel_tags:
            continue
        # A pinned version may be a pre-release.
        if requirement.specifier.contains(version, prereleases=True):
            wheels[version] = path
    return wheels[max(wheels)] if wheels else None


def _wheel_folder() -> Path:
    folder = BUILD / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def describe_full_disk(errors: str, folder: Path, free_bytes: int = _FULL) -> str:
    """Return a sentence if the errors result from a full disk, otherwise an empty text.

    A disk with less than ``free_bytes`` bytes free is assumed to be the cause of any error.
    """
    for location in (folder, Path(tempfile.gettempdir())):
        free = shutil.disk_usage(location).free
        if free < free_bytes:
            size = formats.size(free)
            return f"the disk of {location} has {size} free: free some space, or choose another disk with TMPDIR"
    if os.strerror(errno.ENOSPC) in errors:
        return f"the disk of {folder} or of {tempfile.gettempdir()} became full: free some space"
    return ""


# pip


def pip_version() -> str:
    """Return the version of the host's pip; raises HostError if pip is missing."""
    try:
        return metadata.version("pip")
    except metadata.PackageNotFoundError:
        text = f"pip is missing, which fetches the wheels of images: run '{sys.executable} -m ensurepip'"
        raise HostError(text) from None


def pip_wheels(folder: Path, target: Target, *arguments: str) -> str:
    """Write wheels for an image into a folder with the host's pip; return an error, or an empty text.

    Source packages can be built only on a host with the image's platform.
    """
    done = subprocess.run(
        [*_pip_command(folder, target), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return _explain_pip_failure(done.stderr, folder) if done.returncode else ""


def _pip_command(folder: Path, target: Target) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if target.is_this_machine():
        return [*pip, "wheel", "--wheel-dir", str(folder)]
    # `pip wheel` has no option for another platform, and pip downloads for one only what needs no build.
    command = [*pip, "download", "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--dest", str(folder)]
    for name in target.platforms:
        command += ["--platform", name]
    return command


def _explain_pip_failure(errors: str, folder: Path) -> str:
    """Return the cause of a pip failure in one line."""
    full = describe_full_disk(errors, folder)
    if full:
        return full
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    # The first error is the cause; later ones follow from it.
    complaint = lines[0] if lines else errors[-200:].strip()
    if "from versions: none" in complaint and "after connection broken" in errors:
        return "no package index can be reached: check the network and pip's proxy and indexes ('pip config list')"
    return f"{complaint}; check pip's configuration"

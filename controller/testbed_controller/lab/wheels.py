"""Python packages of the images: their names, versions and wheels.

`requirements` computes the packages of an image with all dependencies, and `fetch_wheels` returns a wheel for each,
from a cache folder or fetched by the host's pip. Packages are resolved for the Python and platform of the images (a
`Target`), which may differ from those of the controller.
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
"""Python version of every image, as in Debian 12; the controller may run on another version."""
_GLIBC_MINOR = 36
"""Minor version of glibc in Debian 12, which has glibc 2.36."""
REQUIREMENTS = {
    "device": ("agent", "device"),
    "shaper": ("shaper",),
    "agent": ("agent",),
}
"""Package lists of each kind of image: ``agent`` stands for ``images/agent.requirements``."""
_FULL_DISK_BYTES = 20 << 20
"""Free space in bytes below which a disk counts as full."""
_LINUX_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Linux's names of processor architectures that Docker names differently."""


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
        """The variables of environment markers, such as ``python_version`` in ``tomli; python_version < "3.11"``."""
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
        names = [f"manylinux_2_{minor}" for minor in range(_GLIBC_MINOR, 4, -1)]
        # Names from before PEP 600, under which many wheels are still published.
        names += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        return [f"{name}_{self.machine}" for name in names]

    def supported_tags(self) -> set[tags.Tag]:
        """Return the tags of all compatible wheels."""
        version = tuple(int(part) for part in PYTHON.split("."))
        interpreter = f"cp{version[0]}{version[1]}"
        # Wheels with compiled code for this Python, and wheels of Python code only.
        compiled = tags.cpython_tags(version, platforms=self.platforms)
        pure = tags.compatible_tags(version, interpreter, self.platforms)
        return {*compiled, *pure}

    def is_this_machine(self) -> bool:
        """Return whether wheels that pip builds or selects for this process fit the image."""
        library, version = platform.libc_ver()
        major, _, minor = version.partition(".")
        if library != "glibc" or major != "2" or not minor:
            return False
        # A program may use an older glibc than its system's, but not a newer one.
        if int(minor) > _GLIBC_MINOR:
            return False
        has_same_python = platform.python_version_tuple()[:2] == tuple(
            PYTHON.split(".")
        )
        return has_same_python and host_machine() == self.machine


def host_machine() -> str:
    """Return the machine's processor architecture, by Linux's name."""
    return machine_name(platform.machine())


def machine_name(architecture: str) -> str:
    """Return Linux's name of a processor architecture.

    >>> machine_name("amd64"), machine_name("aarch64")
    ('x86_64', 'aarch64')
    """
    return _LINUX_NAMES.get(architecture.lower(), architecture)


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
    requested = os.environ.get("TESTBED_TORCH") or "cpu"
    if requested not in ("cpu", "cuda"):
        raise HostError(f"unknown TESTBED_TORCH={requested}: set it to cpu or cuda")
    if requested == "cuda" or installed.endswith("+cpu"):
        return (installed,)
    release = installed.partition("+")[0]
    return (f"{release}+cpu", installed)


def fetch_cpu_torch(target: Target, say: Say) -> bool:
    """Fetch the CPU build of torch for an image; return whether a package index provides the build."""
    folder = _wheel_folder()
    requirement = Requirement(f"torch=={target.torch}")
    if _find_wheel(folder, requirement, target.supported_tags()) is not None:
        return True
    say(
        f"fetching torch {target.torch} for the images; TESTBED_TORCH=cuda takes the CUDA build"
    )
    script = str(RECIPES / "cpu-torch")
    pip = _pip_command(folder, target)
    command = ["sh", script, target.torch, *pip, "--no-deps"]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        say(result.stdout.strip())
    return result.returncode == 0


def requirements(kind: str, target: Target) -> dict[str, str]:
    """Return the Python packages of an image with all dependencies: name -> version specifier.

    Dependencies follow extras and markers as in pip, for the image's Python and platform. Versions are those of this
    environment, which is made from ``requirements.lock``, so host and devices compute with equal versions. A package
    that only the image's platform needs is not installed here, and keeps the specifiers of the packages that require
    it. Raises `HostError` if a listed package is not installed here.
    """
    packages: dict[str, str] = {}
    # The merged requirements of packages that are not installed here.
    absent: dict[str, Requirement] = {}
    # Pairs of package and extra whose dependencies have been added, since dependencies may form a cycle.
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
            merged = absent.setdefault(name, Requirement(name))
            merged.extras |= requirement.extras
            merged.specifier &= requirement.specifier
            packages[name] = str(merged).removeprefix(name)
            continue
        environment = target.environment
        packages[name] = f"=={distribution.version}"
        if name == "torch":
            packages[name] = _pin_torch(target.torch)
            if target.torch.endswith("+cpu"):
                # Torch requires CUDA's packages on Linux, but its CPU build does not need them.
                environment["platform_system"] = ""
        lines = distribution.requires or ()
        for extra in ("", *requirement.extras):
            if (name, extra) not in expanded:
                expanded.add((name, extra))
                waiting += _filter_requirements(lines, {**environment, "extra": extra})
    return dict(sorted(packages.items()))


def _pin_torch(version: str) -> str:
    # "==2.13.0" would also accept 2.13.0+cpu; "===" compares the whole text.
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
    """Return a wheel of each package (name -> specifier) and of pip itself, from the cache or fetched by the host's
    pip.

    Raises `HostError` if pip fails.
    """
    specifiers = {**packages, "pip": f"=={pip_version()}"}
    requested = [
        Requirement(name + specifier) for name, specifier in specifiers.items()
    ]
    return complete_wheels(_wheel_folder(), requested, target)


def complete_wheels(
    folder: Path, requested: Iterable[Requirement], target: Target
) -> list[Path]:
    """Return wheels for the requested packages and all dependencies from a folder, after fetching missing ones.

    pip evaluates markers for the host, so dependencies specific to the image are resolved here, from the metadata of
    the wheels. Raises `HostError` if pip fails.
    """
    pinned = {canonicalize_name(root.name): root for root in requested}
    attempted: set[str] = set()
    # Each pass reads the requirements of the wheels that the pass before has fetched.
    while True:
        wheels, missing = _walk_wheels(folder, pinned, target)
        if not missing:
            return sorted(wheels.values())
        failed = attempted.intersection(missing)
        if failed:
            raise HostError(
                f"pip succeeded without a wheel of {', '.join(sorted(failed))}: remove {folder} and try again"
            )
        attempted.update(missing)
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
    device_packages = requirements("device", target)
    requested = _parse_requirements(packages)
    arguments = [*packages, f"pip=={pip_version()}"]
    if "torch" not in [canonicalize_name(root.name) for root in requested]:
        if target.torch.endswith("+cpu"):
            fetch_cpu_torch(target, say)
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch{device_packages['torch']}\n")
        arguments += ["--constraint", str(constraints)]
        arguments += ["--find-links", str(_wheel_folder())]
    complaint = pip_wheels(folder, target, *arguments)
    if complaint:
        raise HostError(
            f"pip cannot fetch {', '.join(packages)}: {complaint}; check the names of the packages"
        )
    if not target.is_this_machine():
        complete_wheels(folder, requested, target)
    wheels = sorted(folder.glob("*.whl"))
    return [path for path in wheels if not _is_in_image(path, device_packages)]


def _parse_requirements(packages: Iterable[str]) -> list[Requirement]:
    """Return the packages with a name; paths and addresses, which pip accepts too, have none."""
    named = []
    for text in packages:
        with suppress(InvalidRequirement):
            named.append(Requirement(text))
    return named


def _is_in_image(path: Path, image_packages: Mapping[str, str]) -> bool:
    """Return whether an image has the package of a wheel in the same version."""
    name, version, _, _ = parse_wheel_filename(path.name)
    return image_packages.get(name, "").lstrip("=") == str(version)


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
            # Only at the top: setuptools contains the metadata of other packages in subfolders.
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                folder = zipfile.Path(archive, name.removesuffix("METADATA"))
                return metadata.PathDistribution(folder).requires or []
    raise HostError(f"{path} has no metadata: remove the file and try again")


def _find_wheel(
    folder: Path, requirement: Requirement, supported: set[tags.Tag]
) -> Path | None:
    """Return the newest wheel in a folder with a matching requirement and platform."""
    wheels: dict[Version, Path] = {}
    required_name = canonicalize_name(requirement.name)
    for path in folder.glob("*.whl"):
        try:
            name, version, _, wheel_tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if name != required_name or not supported & wheel_tags:
            continue
        # A pinned version may be a pre-release.
        if requirement.specifier.contains(version, prereleases=True):
            wheels[version] = path
    return wheels[max(wheels)] if wheels else None


def _wheel_folder() -> Path:
    folder = BUILD / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def describe_full_disk(
    errors: str, folder: Path, free_bytes: int = _FULL_DISK_BYTES
) -> str:
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
    result = subprocess.run(
        [*_pip_command(folder, target), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return _explain_pip_failure(result.stderr, folder) if result.returncode else ""


def _pip_command(folder: Path, target: Target) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if target.is_this_machine():
        return [*pip, "wheel", "--wheel-dir", str(folder)]
    # `pip wheel` has no option for another platform; `pip download` has one, but only for packages that need no build.
    command = [*pip, "download", "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--dest", str(folder)]
    for name in target.platforms:
        command += ["--platform", name]
    return command


def _explain_pip_failure(errors: str, folder: Path) -> str:
    """Return the cause of a pip failure in one line."""
    disk_message = describe_full_disk(errors, folder)
    if disk_message:
        return disk_message
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    # The first error is the cause; the others follow from it. Without an error line, the end of the output may help.
    complaint = lines[0] if lines else errors[-200:].strip()
    if "from versions: none" in complaint and "after connection broken" in errors:
        return "no package index can be reached: check the network and pip's proxy and indexes ('pip config list')"
    return f"{complaint}; check pip's configuration"

"""Python packages of the images: the same versions as on the host, as pip would install them in the image."""

from __future__ import annotations

import os
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from testbed.common.errors import HostError
from testbed_controller.lab import images, wheels
from testbed_controller.lab.wheels import Target
from tests.helpers import ROOT

HERE = Path(__file__).parent
BUILDS = ("2.13.0", "2.15.0")
"""CUDA builds of torch: `torch-*.metadata` holds the metadata of all CUDA packages that pip installs with them."""
PURE = {
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "setuptools",
    "sympy",
    "typing-extensions",
}
"""The other packages that pip installs with torch."""


def read_packages(build: str) -> dict[str, str]:
    """Return the metadata of each CUDA package of a build of torch."""
    texts = (HERE / f"torch-{build}.metadata").read_text().split("\n\n")
    return {text.split()[1]: text for text in texts}


def version_of(text: str) -> str:
    return text.split("Version: ")[1].split()[0]


def install(folder: Path, packages: dict[str, str]) -> None:
    """Install packages without any content."""
    for name, text in packages.items():
        path = folder / f"{name.replace('-', '_')}-{version_of(text)}.dist-info"
        path.mkdir(parents=True)
        (path / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")


@pytest.fixture
def only_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make torch the only requirement of the image; return a folder of additional installed packages."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "device.requirements").write_text("torch\n")
    monkeypatch.setattr(wheels, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(wheels, "REQUIREMENTS", {"device": ("device",)})
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    return tmp_path / "installed"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("build", BUILDS)
def test_cuda_build_has_packages_that_pip_installs(
    build: str, machine: str, only_torch: Path
) -> None:
    packages = read_packages(build)
    install(only_torch, packages)
    requirements = wheels.requirements("device", Target(machine, build))
    assert set(requirements) == {*packages, *PURE}
    # With `==`, pip would accept a build such as 2.13.0+cpu.
    assert requirements["torch"] == f"==={build}"
    del packages["torch"]
    for name, text in packages.items():
        assert requirements[name] == f"=={version_of(text)}"


@pytest.mark.parametrize("build", BUILDS)
def test_cpu_build_needs_no_cuda_packages_of_host(build: str, only_torch: Path) -> None:
    install(only_torch, read_packages(build))
    requirements = wheels.requirements("device", Target("x86_64", f"{build}+cpu"))
    assert set(requirements) == {"torch", *PURE}
    assert requirements["torch"] == f"=={build}+cpu"


def test_tag_of_image_does_not_depend_on_build_of_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target("x86_64", "2.13.0+cpu")
    cuda_packages = read_packages("2.13.0")
    cpu_torch = cuda_packages["torch"].replace("2.13.0", "2.13.0+cpu", 1)
    # CUDA packages are required on Linux only.
    lines = [line for line in cpu_torch.splitlines() if "Linux" not in line]
    tags = []
    for name, packages in (
        ("cuda", cuda_packages),
        ("cpu", {"torch": "\n".join(lines)}),
    ):
        install(tmp_path / name, packages)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / name))
            tags.append(images.image_tags(target))
    on_cuda_host, on_cpu_host = tags
    assert on_cuda_host == on_cpu_host
    cuda_tags = images.image_tags(Target("x86_64", "2.13.0"))
    assert cuda_tags.device != on_cpu_host.device
    # The shaper has no torch.
    assert cuda_tags.shaper == on_cpu_host.shaper


def test_markers_are_evaluated_for_image_instead_of_host(only_torch: Path) -> None:
    # The image has Linux, Python 3.11 and the processor of the target.
    lines = ["Name: torch", "Version: 2.13.0"]
    for name, marker in (
        ("old", 'python_version < "3.12"'),
        ("new", 'python_version >= "3.12"'),
        ("mac", 'sys_platform == "darwin"'),
        ("arm", 'platform_machine == "aarch64"'),
    ):
        lines.append(f"Requires-Dist: {name}>=1; {marker}")
    install(only_torch, {"torch": "\n".join(lines)})
    requirements = wheels.requirements("device", Target("aarch64", "2.13.0"))
    assert requirements == {"arm": ">=1", "old": ">=1", "torch": "===2.13.0"}


def test_packages_of_image_alone_are_read_from_metadata_of_wheels(
    only_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on macOS: torch is installed, without the packages for Linux.
    packages = read_packages("2.13.0")
    install(only_torch, {"torch": packages["torch"]})
    target = Target("aarch64", "2.13.0")
    for name in ("pip", *PURE):
        packages[name] = f"Name: {name}\nVersion: {metadata.version(name)}\n"

    def fetch(folder: Path, target: Target, *arguments: str) -> str:
        tag = f"py3-none-manylinux_2_27_{target.machine}"
        for argument in arguments:
            # Others are options of pip.
            if not argument.startswith("-"):
                name = Requirement(argument).name
                write_wheel(folder, name, packages[name], tag)
        return ""

    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    monkeypatch.setattr(wheels, "pip_wheels", fetch)
    requirements = wheels.requirements("device", target)
    assert requirements["cuda-toolkit"].startswith("[cublas,cudart,")
    fetched = set()
    for path in wheels.fetch_wheels(requirements, target):
        fetched.add(path.name.split("-")[0].replace("_", "-"))
    assert fetched == set(packages)


def write_wheel(folder: Path, name: str, text: str, tag: str) -> None:
    stem = f"{name.replace('-', '_')}-{version_of(text)}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
        # Metadata of a vendored package must not be mistaken for those of the wheel.
        archive.writestr(
            "vendored/other-1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
        )
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\n{text}")


@pytest.mark.usefixtures("only_torch")
def test_missing_package_is_reported_with_file_that_requires_it() -> None:
    (wheels.RECIPES / "device.requirements").write_text("no-such-package\n")
    message = r"no-such-package.*device\.requirements.*requirements\.lock"
    with pytest.raises(HostError, match=message):
        wheels.requirements("device", Target("x86_64", "2.13.0+cpu"))


def test_image_has_extras_installed_on_host(only_torch: Path) -> None:
    (wheels.RECIPES / "device.requirements").write_text("")
    (wheels.RECIPES / "device.extras").write_text("torchmetrics\nno-such-package\n")
    install(only_torch, {"torchmetrics": "Name: torchmetrics\nVersion: 1.9.0"})
    assert wheels.list_packages("device") == ["torchmetrics"]
    assert wheels.requirements("device", Target("x86_64", "2.13.0+cpu")) == {
        "torchmetrics": "==1.9.0"
    }


def test_device_image_has_torch_and_dependencies_in_versions_of_host() -> None:
    target = Target("x86_64", wheels.torch_builds()[0])
    requirements = wheels.requirements("device", target)
    assert requirements["torch"].startswith("==2.13.0")
    # Some dependencies of the agent and of torch.
    for name in ("flask", "werkzeug", "markupsafe", "sympy", "typing-extensions"):
        assert name in requirements
    assert "pytest" not in requirements
    assert "torch" not in wheels.requirements("shaper", target)


@pytest.mark.parametrize(
    ("requirement", "name", "fits"),
    [
        ("jaraco-functools==4.6.0", "jaraco_functools-4.6.0-py3-none-any", True),
        (
            "torch==2.13.0+cpu",
            "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64",
            True,
        ),
        ("torch==2.13.0+cpu", "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64", False),
        ("torch===2.13.0", "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64", False),
        ("numpy==2.4.6", "numpy-2.4.6-cp311-cp311-manylinux_2_28_aarch64", False),
        ("numpy==2.4.6", "numpy-2.4.6-cp313-cp313-manylinux_2_28_x86_64", False),
        ("numpy==2.4.6", "numpy-2.4.6-cp311-cp311-macosx_14_0_arm64", False),
        ("numpy==2.4.6", "numpy-2.4.6-cp311-cp311-manylinux_2_39_x86_64", False),
        (
            "safetensors==0.8.0",
            "safetensors-0.8.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64",
            True,
        ),
    ],
)
def test_wheel_is_used_if_version_build_and_platform_fit(
    requirement: str, name: str, fits: bool, tmp_path: Path
) -> None:
    # The image has Python 3.11 and a C library older than 2.39.
    (tmp_path / f"{name}.whl").touch()
    supported = Target("x86_64", "2.13.0").supported_tags()
    wheel = wheels._find_wheel(tmp_path, Requirement(requirement), supported)
    assert (wheel is not None) == fits


@pytest.mark.parametrize(
    ("installed", "choice", "builds"),
    [
        ("2.13.0", "", ("2.13.0+cpu", "2.13.0")),
        ("2.13.0+cu130", "cpu", ("2.13.0+cpu", "2.13.0+cu130")),
        ("2.13.0+cpu", "", ("2.13.0+cpu",)),
        ("2.13.0", "cuda", ("2.13.0",)),
    ],
)
def test_cpu_build_is_preferred_unless_cuda_is_chosen(
    installed: str,
    choice: str,
    builds: tuple[str, ...],
    only_torch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(only_torch, {"torch": f"Name: torch\nVersion: {installed}\n"})
    monkeypatch.setenv("TESTBED_TORCH", choice)
    assert wheels.torch_builds() == builds


def test_unknown_build_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_TORCH", "rocm")
    with pytest.raises(HostError, match="TESTBED_TORCH=rocm"):
        wheels.torch_builds()


def test_run_uses_images_of_build_present_on_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "torch_builds", lambda: ("2.13.0+cpu", "2.13.0"))
    present: set[str] = set()

    def get(tag: str) -> None:
        if tag not in present:
            raise images.ImageNotFound(tag)

    client = SimpleNamespace(
        images=SimpleNamespace(get=get), info=lambda: {"Architecture": "x86_64"}
    )
    cpu = images.image_tags(Target("x86_64", "2.13.0+cpu"))
    cuda = images.image_tags(Target("x86_64", "2.13.0"))
    assert images.find_tags(client) == cpu  # type: ignore[arg-type]
    # The image of the runtime takes longest to build.
    present.add(cuda.device_runtime)
    assert images.find_tags(client) == cuda  # type: ignore[arg-type]
    present.add(cpu.device_runtime)
    assert images.find_tags(client) == cpu  # type: ignore[arg-type]
    # A complete image precedes both.
    present.add(cuda.device)
    assert images.find_tags(client) == cuda  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "calls", "status"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)]
)
def test_cpu_wheels_come_from_configured_index_before_another(
    failures: int, calls: int, status: int, tmp_path: Path
) -> None:
    # A replacement of pip that records its arguments and fails for the first calls.
    pip = tmp_path / "pip"
    log = tmp_path / "calls"
    pip.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\ntest "$(wc -l <{log})" -gt {failures}\n'
    )
    pip.chmod(0o755)
    environment = {**os.environ, "TESTBED_TORCH_INDEX": "file:///cpu"}
    command = [ROOT / "images" / "cpu-torch", "2.13.0+cpu", pip, "wheel", "--no-deps"]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    )
    first, *others = log.read_text().splitlines()
    assert result.returncode == status
    assert 1 + len(others) == calls
    assert first == "wheel --no-deps torch==2.13.0+cpu"
    for call in others:
        assert "--index-url file:///cpu" in call
    assert ("TESTBED_TORCH_INDEX" in result.stdout) == (status == 1)


def test_unreachable_package_index_is_named_as_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Port 9 (discard) is closed.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    target = Target(wheels.host_machine(), "2.13.0")
    problem = wheels.pip_wheels(tmp_path, target, "--no-deps", "blinker==1.9.0")
    assert "no package index can be reached" in problem


def test_full_disk_is_named_as_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wheels.describe_full_disk("", tmp_path) == ""
    problem = wheels.describe_full_disk("tar: No space left on device", tmp_path)
    assert "became full" in problem
    usage = SimpleNamespace(free=4096)
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: usage)
    # Programs on a full disk fail with all kinds of messages.
    error = "E: gpg failed to initialize trustdb"
    assert wheels._explain_pip_failure(error, tmp_path).startswith("the disk of")


def test_packages_of_program_use_torch_of_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(wheels.host_machine(), wheels.torch_builds()[0])
    requested: list[str] = []

    def fetch(folder: Path, _: Target, *arguments: str) -> str:
        requested.extend(arguments)
        numpy = metadata.version("numpy")
        for stem in (
            "flwr-1.22.0",
            f"torch-{target.torch}",
            f"numpy-{numpy}",
            "click-1.0",
        ):
            (folder / f"{stem}-py3-none-any.whl").touch()
        return ""

    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    monkeypatch.setattr(wheels, "pip_wheels", fetch)
    monkeypatch.setattr(wheels, "fetch_cpu_torch", lambda *_: True)
    monkeypatch.setattr(Target, "is_this_machine", lambda _: True)
    packages = ["flwr==1.22.0"]
    paths = wheels.fetch_program_wheels(tmp_path / "flwr", packages, target, print)
    # The image has torch and NumPy already.
    assert {path.name.split("-")[0] for path in paths} == {"flwr", "click"}
    constraints = Path(requested[requested.index("--constraint") + 1])
    assert constraints.read_text().strip() == f"torch=={target.torch}"
    # A program may have its own version of torch.
    requested.clear()
    wheels.fetch_program_wheels(tmp_path / "older", ["torch==2.9.0"], target, print)
    assert "--constraint" not in requested

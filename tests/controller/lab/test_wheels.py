"""The Python packages of the images equal those that pip would install there."""

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
    """An image that needs nothing but torch; the folder of further installed packages."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "device.requirements").write_text("torch\n")
    monkeypatch.setattr(wheels, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(wheels, "REQUIREMENTS", {"device": ("device",)})
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    return tmp_path / "installed"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("build", BUILDS)
def test_a_cuda_build_gets_the_packages_that_pip_installs(
    build: str, machine: str, only_torch: Path
) -> None:
    packages = read_packages(build)
    install(only_torch, packages)
    found = wheels.requirements("device", Target(machine, build))
    assert set(found) == {*packages, *PURE}
    assert found["torch"] == f"==={build}"
    versions = {
        name: f"=={version_of(text)}"
        for name, text in packages.items()
        if name != "torch"
    }
    assert {name: found[name] for name in versions} == versions


@pytest.mark.parametrize("build", BUILDS)
def test_the_cpu_build_needs_no_cuda_package_though_the_host_has_them(
    build: str, only_torch: Path
) -> None:
    install(only_torch, read_packages(build))
    found = wheels.requirements("device", Target("x86_64", f"{build}+cpu"))
    assert set(found) == {"torch", *PURE}
    assert found["torch"] == f"=={build}+cpu"


def test_the_image_of_a_cpu_build_has_one_name_whichever_build_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target("x86_64", "2.13.0+cpu")
    cpu = {"torch": read_packages("2.13.0")["torch"].replace("2.13.0", "2.13.0+cpu", 1)}
    cpu["torch"] = "\n".join(
        line for line in cpu["torch"].splitlines() if "Linux" not in line
    )
    tags = []
    for name, packages in (("cuda", read_packages("2.13.0")), ("cpu", cpu)):
        install(tmp_path / name, packages)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / name))
            tags.append(images.image_tags(target))
    assert tags[0] == tags[1]
    assert images.image_tags(Target("x86_64", "2.13.0")).device != tags[0].device
    assert images.image_tags(Target("x86_64", "2.13.0")).shaper == tags[0].shaper


def test_markers_are_those_of_the_image_and_not_of_the_host(only_torch: Path) -> None:
    lines = ["Name: torch", "Version: 2.13.0"]
    for name, marker in (
        ("old", 'python_version < "3.12"'),
        ("new", 'python_version >= "3.12"'),
        ("mac", 'sys_platform == "darwin"'),
        ("arm", 'platform_machine == "aarch64"'),
    ):
        lines.append(f"Requires-Dist: {name}>=1; {marker}")
    install(only_torch, {"torch": "\n".join(lines)})
    found = wheels.requirements("device", Target("aarch64", "2.13.0"))
    assert found == {"arm": ">=1", "old": ">=1", "torch": "===2.13.0"}


def test_packages_that_only_the_image_needs_are_found_in_the_metadata_of_wheels(
    only_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on macOS: torch is installed, and none of the packages that it needs on Linux.
    packages = read_packages("2.13.0")
    install(only_torch, {"torch": packages["torch"]})
    target = Target("aarch64", "2.13.0")
    for name in ("pip", *PURE):
        packages[name] = f"Name: {name}\nVersion: {metadata.version(name)}\n"

    def fetch(folder: Path, asked: Target, *arguments: str) -> str:
        for text in arguments:
            if not text.startswith("-"):
                name = Requirement(text).name
                write_wheel(
                    folder,
                    name,
                    packages[name],
                    f"py3-none-manylinux_2_27_{asked.machine}",
                )
        return ""

    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    monkeypatch.setattr(wheels, "pip_wheels", fetch)
    wanted = wheels.requirements("device", target)
    assert wanted["cuda-toolkit"].startswith("[cublas,cudart,")
    found = {
        path.name.split("-")[0].replace("_", "-")
        for path in wheels.fetch_wheels(wanted, target)
    }
    assert found == set(packages)


def write_wheel(folder: Path, name: str, text: str, tag: str) -> None:
    stem = f"{name.replace('-', '_')}-{version_of(text)}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
        archive.writestr(
            "vendored/other-1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
        )
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\n{text}")


def test_a_package_that_is_not_installed_is_reported_with_the_file_that_wants_it(
    only_torch: Path,
) -> None:
    (wheels.RECIPES / "device.requirements").write_text("no-such-package\n")
    with pytest.raises(
        HostError, match=r"no-such-package.*device\.requirements.*requirements\.lock"
    ):
        wheels.requirements("device", Target("x86_64", "2.13.0+cpu"))


def test_an_image_has_the_extras_that_are_installed_here(only_torch: Path) -> None:
    (wheels.RECIPES / "device.requirements").write_text("")
    (wheels.RECIPES / "device.extras").write_text("torchmetrics\nno-such-package\n")
    install(only_torch, {"torchmetrics": "Name: torchmetrics\nVersion: 1.9.0"})
    assert wheels.list_packages("device") == ["torchmetrics"]
    assert wheels.requirements("device", Target("x86_64", "2.13.0+cpu")) == {
        "torchmetrics": "==1.9.0"
    }


def test_device_image_has_torch_and_dependencies_in_the_host_versions() -> None:
    target = Target("x86_64", wheels.torch_builds()[0])
    found = wheels.requirements("device", target)
    assert found["torch"].startswith("==2.13.0")
    assert {"flask", "werkzeug", "markupsafe", "sympy", "typing-extensions"} <= set(
        found
    )
    assert "pytest" not in found
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
def test_a_wheel_is_taken_if_version_build_and_platform_fit(
    requirement: str, name: str, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.whl").touch()
    supported = Target("x86_64", "2.13.0").supported_tags()
    assert (
        wheels._find_wheel(tmp_path, Requirement(requirement), supported) is not None
    ) == fits


@pytest.mark.parametrize(
    ("installed", "wish", "builds"),
    [
        ("2.13.0", "", ("2.13.0+cpu", "2.13.0")),
        ("2.13.0+cu130", "cpu", ("2.13.0+cpu", "2.13.0+cu130")),
        ("2.13.0+cpu", "", ("2.13.0+cpu",)),
        ("2.13.0", "cuda", ("2.13.0",)),
    ],
)
def test_images_prefer_the_cpu_build_unless_cuda_is_asked_for(
    installed: str,
    wish: str,
    builds: tuple[str, ...],
    only_torch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(only_torch, {"torch": f"Name: torch\nVersion: {installed}\n"})
    monkeypatch.setenv("TESTBED_TORCH", wish)
    assert wheels.torch_builds() == builds


def test_an_unknown_build_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTBED_TORCH", "rocm")
    with pytest.raises(HostError, match="TESTBED_TORCH=rocm"):
        wheels.torch_builds()


def test_a_run_uses_the_images_of_the_build_that_the_engine_has(
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
    cpu, cuda = (
        images.image_tags(Target("x86_64", torch)) for torch in ("2.13.0+cpu", "2.13.0")
    )
    assert images.present_tags(client) == cpu  # type: ignore[arg-type]
    present.add(cuda.device_runtime)
    assert images.present_tags(client) == cuda  # type: ignore[arg-type]
    present.update([cpu.device_runtime])
    assert images.present_tags(client) == cpu  # type: ignore[arg-type]
    present.update([cuda.device])
    assert images.present_tags(client) == cuda  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "calls", "status"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)]
)
def test_cpu_wheels_come_from_pips_own_indexes_first_then_from_another(
    failures: int, calls: int, status: int, tmp_path: Path
) -> None:
    pip = tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\ntest "$(wc -l <{tmp_path}/calls)" -gt {failures}\n'
    )
    pip.chmod(0o755)
    environment = {**os.environ, "TESTBED_TORCH_INDEX": "file:///cpu"}
    command = [ROOT / "images" / "cpu-torch", "2.13.0+cpu", pip, "wheel", "--no-deps"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    )
    made = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, len(made)) == (status, calls)
    assert made[0] == "wheel --no-deps torch==2.13.0+cpu"
    assert all("--index-url file:///cpu" in each for each in made[1:])
    assert ("TESTBED_TORCH_INDEX" in done.stdout) == (status == 1)


def test_a_package_index_that_cannot_be_reached_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("INDEX_URL", "http://127.0.0.1:9/simple"),
        ("RETRIES", "1"),
        ("CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    target = Target(wheels.host_machine(), "2.13.0")
    assert "no package index can be reached" in wheels.pip_wheels(
        tmp_path, target, "--no-deps", "blinker==1.9.0"
    )


def test_a_full_disk_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wheels.describe_full_disk("", tmp_path) == ""
    assert "became full" in wheels.describe_full_disk(
        "tar: No space left on device", tmp_path
    )
    monkeypatch.setattr(
        wheels.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096)
    )
    assert wheels._explain_pip_failure(
        "E: gpg failed to initialize trustdb", tmp_path
    ).startswith("the disk of")


def test_packages_of_a_program_share_the_torch_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(wheels.host_machine(), wheels.torch_builds()[0])
    asked: list[str] = []

    def fetch(folder: Path, _: Target, *arguments: str) -> str:
        asked.extend(arguments)
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
    found = wheels.fetch_program_wheels(
        tmp_path / "flwr", ["flwr==1.22.0"], target, print
    )
    assert {path.name.split("-")[0] for path in found} == {"flwr", "click"}
    constraints = Path(asked[asked.index("--constraint") + 1])
    assert constraints.read_text().strip() == f"torch=={target.torch}"
    asked.clear()
    wheels.fetch_program_wheels(tmp_path / "older", ["torch==2.9.0"], target, print)
    assert "--constraint" not in asked

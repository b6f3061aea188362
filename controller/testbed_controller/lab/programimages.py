"""The images of programs: the user's own, or ours with more Python packages; the agent runs beside what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import docker
from docker.errors import ImageNotFound

from testbed.common.errors import InputError
from testbed.experiment import Experiment
from testbed.methods.program.workload import ProgramPart, programs_of
from testbed.work import WorkloadPart
from testbed_controller.lab.engine import Say
from testbed_controller.lab.images import (
    LABEL,
    ImageTags,
    build,
    digest,
    ensure_agent,
    exists,
    one_at_a_time,
    recipe,
)
from testbed_controller.lab.paths import BUILD
from testbed_controller.lab.wheels import fetch_program_wheels


def device_images(
    client: docker.DockerClient, workload: WorkloadPart, experiment: Experiment, ours: ImageTags, say: Say
) -> dict[str, str]:
    """Return the tag of each device's image; build those of programs that are missing.

    Raises InputError where the engine has no such image of the user's; HostError where one cannot be built.
    """
    programs = programs_of(workload, [device.name for device in experiment.devices])
    tags = {device.name: ours.device for device in experiment.devices}
    for name, part in programs.items():
        if part.image or part.packages:
            tags[name] = _ensure(client, part, ours, say)
    return tags


def _ensure(client: docker.DockerClient, part: ProgramPart, ours: ImageTags, say: Say) -> str:
    """Return the tag of an image with the agent beside what the program asks for."""
    with one_at_a_time():
        agent = ensure_agent(client, say)
        image = part.image or _with_packages(client, part.packages, ours, say)
        try:
            identity = str(client.images.get(image).id)
        except ImageNotFound:
            text = f"the engine has no image '{image}': docker pull it, or build it, then try again"
            raise InputError(text, ("workload", "programs")) from None
        file = recipe("program")
        tag = f"testbed/program:{digest({'agent': agent.encode(), 'image': identity.encode(), 'recipe': file})}"
        if not exists(client, tag):
            say(f"putting the agent beside {image} into {tag}")
            build(client, tag, file, {}, {"AGENT": agent, "IMAGE": image}, {LABEL: "program"})
    return tag


def _with_packages(client: docker.DockerClient, packages: Sequence[str], ours: ImageTags, say: Say) -> str:
    """Return the tag of an image with Debian, Python, torch and these packages."""
    file, wanted = recipe("packages"), "\n".join(sorted(packages)).encode()
    tag = f"testbed/packages:{digest({'on': ours.device_runtime.encode(), 'packages': wanted, 'recipe': file})}"
    if not exists(client, tag):
        say(f"building {tag} with {', '.join(packages)}")
        folder = BUILD / "packages" / digest({ours.device_runtime: b"", **dict.fromkeys(packages, b"")})
        wheels = fetch_program_wheels(folder, packages, ours.target, say)
        files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in wheels}
        build(client, tag, file, files, {"RUNTIME": ours.device_runtime}, {LABEL: "packages"})
    return tag

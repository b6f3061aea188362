"""Images of programs: a user's image or ours with further Python packages, extended with the agent."""

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
    build_lock,
    digest,
    ensure_agent,
    image_exists,
    recipe,
)
from testbed_controller.lab.paths import BUILD
from testbed_controller.lab.wheels import fetch_program_wheels


def device_images(
    client: docker.DockerClient,
    workload: WorkloadPart,
    experiment: Experiment,
    ours: ImageTags,
    say: Say,
) -> dict[str, str]:
    """Return the tag of each device's image, after building missing images of programs.

    Raises InputError if the engine lacks a user's image, and HostError if a build fails.
    """
    programs = programs_of(workload, [device.name for device in experiment.devices])
    tags = {device.name: ours.device for device in experiment.devices}
    for name, part in programs.items():
        if part.image or part.packages:
            tags[name] = _ensure_program_image(client, part, ours, say)
    return tags


def _ensure_program_image(
    client: docker.DockerClient, part: ProgramPart, ours: ImageTags, say: Say
) -> str:
    """Return the tag of a program's image with the agent added."""
    with build_lock():
        agent = ensure_agent(client, say)
        image = part.image or _ensure_packages_image(client, part.packages, ours, say)
        try:
            identity = str(client.images.get(image).id)
        except ImageNotFound:
            text = (
                f"the engine has no image '{image}': pull or build it, then try again"
            )
            raise InputError(text, ("workload", "programs")) from None
        file = recipe("program")
        # By the image's identity rather than its name: the user may build another image under the same name.
        parts = {
            "agent": agent.encode(),
            "image": identity.encode(),
            "recipe": file,
        }
        tag = f"testbed/program:{digest(parts)}"
        if not image_exists(client, tag):
            say(f"adding the agent to {image} as {tag}")
            arguments = {"AGENT": agent, "IMAGE": image}
            build(client, tag, file, {}, arguments, {LABEL: "program"})
    return tag


def _ensure_packages_image(
    client: docker.DockerClient, packages: Sequence[str], ours: ImageTags, say: Say
) -> str:
    """Return the tag of an image with Debian, Python, torch and these packages."""
    file = recipe("packages")
    runtime = ours.device_runtime
    parts = {
        "on": runtime.encode(),
        "packages": "\n".join(sorted(packages)).encode(),
        "recipe": file,
    }
    tag = f"testbed/packages:{digest(parts)}"
    if not image_exists(client, tag):
        say(f"building {tag} with {', '.join(packages)}")
        # A folder for each set of packages: pip may choose other versions of shared dependencies.
        key = digest({runtime: b"", **dict.fromkeys(packages, b"")})
        folder = BUILD / "packages" / key
        wheels = fetch_program_wheels(folder, packages, ours.target, say)
        files: dict[str, bytes | Path] = {}
        for path in wheels:
            files[f"wheels/{path.name}"] = path
        arguments = {"RUNTIME": runtime}
        build(client, tag, file, files, arguments, {LABEL: "packages"})
    return tag

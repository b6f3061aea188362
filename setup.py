"""Map the folders of a checkout to packages, and add scenarios and image recipes to the wheel."""

from pathlib import Path

from setuptools import find_packages, setup

BESIDE = {
    "testbed.scenario.shipped": "scenarios",
    "testbed_controller.lab.recipes": "images",
}
"""Package -> folder of data files: shipped scenarios and image recipes."""

FOLDERS = {
    "testbed": "testbed",
    "testbed_agent": "agent/testbed_agent",
    "testbed_controller": "controller/testbed_controller",
}
"""Package -> folder in a checkout. The package names cannot clash with a user's `agent.py` or `controller.py`."""

for scenarios in sorted(Path("papers").glob("*/scenarios")):
    [paper] = scenarios.parent.glob("testbed_*")
    FOLDERS[paper.name] = str(paper)
    BESIDE[f"{paper.name}.scenarios"] = str(scenarios)

FOLDERS["testbed_generation"] = "generation/testbed_generation"
BESIDE["testbed_generation.scenarios"] = "generation/scenarios"

packages = [*BESIDE]
for name, folder in FOLDERS.items():
    packages += [name, *(f"{name}.{below}" for below in find_packages(folder))]

setup(packages=packages, package_dir=FOLDERS | BESIDE)

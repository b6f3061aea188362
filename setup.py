"""Puts into the wheel the files beside the packages of a checkout: the shipped scenarios, and the images' recipes."""

from setuptools import find_packages, setup

BESIDE = {"testbed.scenario.shipped": "scenarios", "testbed_controller.lab.recipes": "images"}

FOLDERS = {
    "testbed": "testbed",
    "testbed_agent": "agent/testbed_agent",
    "testbed_controller": "controller/testbed_controller",
}
"""Where each package lies in a checkout. Their names cannot clash with a user's `agent.py` or `controller.py`."""

packages = [*BESIDE]
for name, folder in FOLDERS.items():
    packages += [name, *(f"{name}.{below}" for below in find_packages(folder))]

setup(packages=packages, package_dir=FOLDERS | BESIDE)

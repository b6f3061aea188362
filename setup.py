"""Puts into the wheel the files beside the packages of a checkout: the shipped scenarios, and the images' recipes."""

from setuptools import find_packages, setup

BESIDE = {"testbed.scenario.shipped": "scenarios", "controller.lab.recipes": "images"}

setup(
    packages=[*find_packages(include=["testbed*", "agent*", "controller*"]), *BESIDE],
    package_dir=BESIDE,
)

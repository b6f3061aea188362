"""Puts into the wheel what lies beside the packages in a checkout: the shipped scenarios, and what makes the images."""

from setuptools import find_packages, setup

BESIDE = {"testbed.scenario.shipped": "scenarios", "controller.lab.recipes": "images"}

setup(packages=[*find_packages(include=["testbed*", "agent*", "controller*"]), *BESIDE], package_dir=BESIDE)

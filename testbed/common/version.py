"""The version of the testbed, which results and images name."""

VERSION = "1.0.0"

"""Random attacks on the testbed, and checks of conditions that every run must meet."""

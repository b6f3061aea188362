"""What the testbed itself costs, measured: `testbed bench`."""

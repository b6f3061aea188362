"""What measures and compares the testbed itself, from a checkout; no part of what is installed."""

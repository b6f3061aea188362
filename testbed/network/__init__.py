"""Links, topologies and what faults do to them: plain data and formulas, no sockets."""

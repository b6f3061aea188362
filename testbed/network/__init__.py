"""Links, topologies and radio as plain data and formulas, without sockets."""

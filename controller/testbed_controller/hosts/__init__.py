"""A lab over several Docker engines: one swarm, a part of the lab on each, one clock."""

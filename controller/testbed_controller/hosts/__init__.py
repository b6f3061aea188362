"""Labs over several Docker engines: one swarm, a part of the lab on each engine, and one common clock."""

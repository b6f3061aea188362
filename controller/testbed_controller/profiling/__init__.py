"""How fast a board or this machine computes: profiles for scenarios, and the times of a model's layers."""

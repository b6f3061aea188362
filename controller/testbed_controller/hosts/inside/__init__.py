"""What runs in the keeper, a container of each host: the far end of the controller's connection, and the reaper."""

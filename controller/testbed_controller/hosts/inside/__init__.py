"""Code of the keeper, a container on each host: the remote end of the controller's connection, and the reaper."""

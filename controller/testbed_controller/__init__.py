"""What runs on the machine of the user: commands, containers, links, faults, results."""

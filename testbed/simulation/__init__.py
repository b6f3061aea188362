"""The device interface on a virtual clock."""

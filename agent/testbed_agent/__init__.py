"""What runs inside a device's container."""

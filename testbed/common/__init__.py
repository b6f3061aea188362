"""Shared foundations: errors, seeds, quantities, and the base class of scenario sections."""

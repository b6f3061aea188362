"""A page on loopback that shows a run while it goes on, and strikes it."""

"""Simulation: the real scheduler, cache manager and router under a virtual clock."""

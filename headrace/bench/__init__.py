"""Workloads and the harness that runs them."""

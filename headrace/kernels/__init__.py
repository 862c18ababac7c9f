"""Kernels, each beside the plain-torch reference that the tests compare it with and that runs where it cannot."""

"""Kernels, each beside the plain-torch twin that the tests compare it with and that runs where it cannot."""

"""Cutting a model among ranks, and communication between them."""

"""Counters and request timelines."""

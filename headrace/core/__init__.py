"""Requests, sequences, plans and the scheduler. Depends on neither torch nor I/O."""

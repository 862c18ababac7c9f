"""A process's use of its machine: child processes, threads, caches, clocks. Imports no torch."""

"""What a process of headrace's own uses of its machine: child processes, threads, caches, clocks. Imports no torch."""

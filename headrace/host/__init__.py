"""The machine: how threads wait, and what the garbage collector leaves alone."""

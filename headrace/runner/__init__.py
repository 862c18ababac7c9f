"""The runner: a function of the stream of step plans."""

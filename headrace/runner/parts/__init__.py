"""Optional subsystems of the runner: media, sparse prompts, the record of plans."""

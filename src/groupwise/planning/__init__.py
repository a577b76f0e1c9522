"""What a run on texts will need of GPUs that are not here: memory of each, and seconds of a step. ``docs/planning.md``."""

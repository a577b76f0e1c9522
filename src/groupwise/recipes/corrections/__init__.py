"""Importance sampling corrections, for a sampler whose probabilities differ from the trainer's."""

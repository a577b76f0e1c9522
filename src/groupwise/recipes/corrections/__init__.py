"""Importance sampling corrections for a sampler whose probabilities are not the trainer's."""

"""Searches of other libraries over runs: Optuna, Ray Tune."""

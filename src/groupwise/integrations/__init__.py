"""Runs under other libraries: searches of Optuna and Ray Tune, workers of Ray Train."""

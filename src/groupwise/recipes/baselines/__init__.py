"""Baselines other than the mean of the group."""

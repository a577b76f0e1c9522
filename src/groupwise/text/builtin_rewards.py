"""Rewards that are registered already."""

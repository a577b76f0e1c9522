"""Integrations that need an extra. They import the core; the core reaches them by name only."""

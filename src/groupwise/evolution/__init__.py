"""Populations of runs that tune their settings while they train."""

"""Variants of papers and libraries: one file each, with its settings, its function and its source.

A file is named after its recipe and imports no torch until it computes, so that settings are read at once.
"""

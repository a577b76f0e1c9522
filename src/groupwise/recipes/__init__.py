"""Variants of papers and libraries, registered by name. Settings are read without importing torch."""

"""Variants of papers and libraries, one file each, named after the recipe. Settings are read without importing torch."""

"""Inference servers: one protocol, adapters over HTTP, and a launcher. Imports no torch."""

"""Inference servers: the protocol, vLLM over HTTP, and a launcher. Imports no torch."""

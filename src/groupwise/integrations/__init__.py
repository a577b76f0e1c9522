"""Runs under other libraries: workers and servers on Ray."""

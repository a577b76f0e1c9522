"""Runs under other libraries: processes and members of populations on Ray."""

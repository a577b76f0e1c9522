"""What needs an extra, and further torch tasks. It imports the core; the core reaches it by name only."""

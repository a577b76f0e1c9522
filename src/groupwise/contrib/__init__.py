"""Code that needs an extra. It imports the core; the core reaches it by name only."""

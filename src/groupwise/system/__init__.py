"""Of the operating system: files, processes, processors, the terminal. Imports no torch, and nothing of groupwise but errors."""

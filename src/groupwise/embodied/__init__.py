"""Robots: tasks, action chunks, vision-language-action policies and demonstrations."""

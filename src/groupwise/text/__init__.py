"""Tasks of language models: prompts, the tokens that they are, and functions that score what is written after them."""

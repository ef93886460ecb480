"""Commands that compare two models, and their tables."""

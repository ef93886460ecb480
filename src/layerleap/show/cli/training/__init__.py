"""Commands that train: maps of a bank, or a copy of a model."""

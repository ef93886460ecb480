"""Activation patching: which part of the model carries the difference between two prompts."""

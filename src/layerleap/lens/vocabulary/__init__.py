"""Neurons, parameters and tokens read in the vocabulary."""

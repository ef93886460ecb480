"""Figures: one function per picture, each drawn from a table."""

"""Stitching: the first blocks of one model and the last blocks of another, joined by a kernel."""

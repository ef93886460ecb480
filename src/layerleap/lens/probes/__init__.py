"""Probes: predict from a single state which rank is being decided."""

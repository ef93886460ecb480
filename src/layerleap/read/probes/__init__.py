"""Probes: what can be read off a single state."""

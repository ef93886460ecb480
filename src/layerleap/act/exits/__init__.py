"""Exits: when to stop early; rules, replay, calibration and cost."""

"""Suitability: does early exit pay off for this model, on this text, on this machine?"""

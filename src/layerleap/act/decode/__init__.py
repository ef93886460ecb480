"""Decode: exact speculative decoding and early exit for `generate`."""

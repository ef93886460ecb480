"""Is early exit worth it for this model, on this text, on this machine?"""

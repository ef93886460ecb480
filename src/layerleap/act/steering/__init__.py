"""Steering: directions that tell two sets of prompts apart, and what adding them costs."""

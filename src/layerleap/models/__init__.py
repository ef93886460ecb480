"""Models: any Hugging Face transformer, its residual stream readable at any depth."""

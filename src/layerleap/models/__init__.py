"""Models: any Hugging Face transformer, with its residual stream readable at any depth."""

"""Two models with one vocabulary: which layers correspond, and what fine-tuning changed."""

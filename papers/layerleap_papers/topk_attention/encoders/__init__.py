"""Tasks for training small classifiers from scratch: sequences of symbols and their classes."""

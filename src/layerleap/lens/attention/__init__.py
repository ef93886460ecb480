"""Attention: which tokens each head looks at, on a text and by named patterns."""

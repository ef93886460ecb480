"""Discovery: where blocks, tail and sites are, and the laws that verify it."""

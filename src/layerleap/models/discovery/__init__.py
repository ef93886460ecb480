"""Discovery: where the blocks, the tail and the sites of a model are, and the laws they obey."""

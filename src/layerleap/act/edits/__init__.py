"""Edits: states patched, parts of blocks replaced, blocks skipped."""

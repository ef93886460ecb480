"""Cursor: a decoder run over its cache, position by position, tree by tree, text by text."""

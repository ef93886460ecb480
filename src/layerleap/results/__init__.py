"""One base for every result: columns in; JSON, data frames, terminal tables and HTML out.

A room that belongs to no stage: it knows rows, columns and cells, and nothing of models.
"""

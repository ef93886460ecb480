"""Reports: one self-contained HTML page per study, with its data beside it."""

from . import edits as edits, exits as exits, learning as learning, metrics as metrics

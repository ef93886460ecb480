"""Hooks: the only code that touches a module's forward pass: capture, recording and edits."""

"""The commands, by what one does with them: look, fit, study."""

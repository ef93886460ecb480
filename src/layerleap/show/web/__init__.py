"""The debugger's server: translates between the engine and the page, and computes nothing."""

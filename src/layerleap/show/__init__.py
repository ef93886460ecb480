"""Show: command line, figures and reports; translates and computes nothing."""

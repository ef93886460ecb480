"""The debugger without its page: prompts traced layer by layer, with and without edits."""

"""The engine of the debugger: prompts traced layer by layer, with and without edits.

`Debugger` answers the questions that the page asks; it needs no browser.
"""

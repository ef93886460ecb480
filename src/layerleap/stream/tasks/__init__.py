"""Tasks: labelled examples with a template, for learning in context or by gradient descent.

load       load("capitals"), or a file or data set of labelled texts, as a Task
names      the bundled tasks
encode     a task in the tokens of a model: prompts, answers, and what fits its context
draw       demonstrations and queries, chosen by a seed
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

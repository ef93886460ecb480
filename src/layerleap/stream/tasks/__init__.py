"""Tasks: labelled examples with a template, for learning in context or by gradient descent.

load       load("capitals"), or a file or data set of labelled texts, as a Task
names      the bundled tasks
encode     a task in the tokens of a model: prompts, answers, and what fits its context
draw       demonstrations and queries, chosen by a seed
"""

from layerleap.stream.tasks.draw import Draw, draw
from layerleap.stream.tasks.load import load, names
from layerleap.stream.tasks.prompts import EncodedTask, Piece, encode
from layerleap.stream.tasks.task import Example, Task

__all__ = ["Draw", "EncodedTask", "Example", "Piece", "Task", "draw", "encode", "load", "names"]

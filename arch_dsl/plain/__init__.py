"""A model as one file of plain PyTorch that nothing of this repository is needed for.

The model is built without data while it is noted how its tensors come about (trace.py). Its forward pass is then run on
what is known of it (frame.py), which leaves functions and methods (program.py). Those become classes (classes.py), and
the file constructs this very model (file.py).
"""

from archlab.arch_dsl.plain import calls, expressions, statements
from archlab.arch_dsl.plain.file import to_python
from archlab.arch_dsl.plain.trees import Unexportable

__all__ = ["Unexportable", "to_python"]

TABLES = (calls, expressions, statements)  # with what they import, they fill the tables of frame.py

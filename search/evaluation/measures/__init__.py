"""What a study may measure of a finished trial: a file per measure, which `evaluate:` names."""

from importlib import import_module
from pkgutil import walk_packages

from archlab.search.evaluation.family import ALL, About, Curve, Found, Grid, Measure, Measures, Subject

__all__ = ["ALL", "About", "Curve", "Found", "Grid", "Measure", "Measures", "Subject"]

_FILES = [file.name for file in walk_packages(__path__, f"{__name__}.")]
for _name in sorted(_FILES, key=lambda name: name.rpartition(".")[2]):  # members are listed in this order
    import_module(_name)

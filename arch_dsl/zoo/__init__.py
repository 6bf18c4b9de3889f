"""The zoo: published architectures by name, each a YAML file in this folder with its sizes, card and recipes."""

from archlab.arch_dsl.zoo.entries import Card, Entry, Size, entry, load, names, recipe
from archlab.arch_dsl.zoo.listing import Row, counted, kind_of, rows
from archlab.arch_dsl.zoo.reference import expand, expand_recipe

__all__ = [
    "Card",
    "Entry",
    "Row",
    "Size",
    "counted",
    "entry",
    "expand",
    "expand_recipe",
    "kind_of",
    "load",
    "names",
    "recipe",
    "rows",
]

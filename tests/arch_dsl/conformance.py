"""The conformance suite is part of the product, for plug-ins; tests import it from here under short names."""

from archlab.arch_dsl.conformance.effects import build, build_as_for_a_gpu, differ, effect, randomize
from archlab.arch_dsl.conformance.fields import alterations, altered, tried
from archlab.arch_dsl.conformance.hosts import (
    CALL,
    HOSTS,
    LENGTH,
    TARGETS,
    TOKENS,
    VOCAB,
    Case,
    cases,
    cases_of,
    gallery,
    load,
    member_data,
    resolve,
    whole_model,
)
from archlab.arch_dsl.conformance.properties import PROPERTIES, one_graph

__all__ = [
    "CALL",
    "HOSTS",
    "LENGTH",
    "PROPERTIES",
    "TARGETS",
    "TOKENS",
    "VOCAB",
    "Case",
    "alterations",
    "altered",
    "build",
    "build_as_for_a_gpu",
    "cases",
    "cases_of",
    "differ",
    "effect",
    "gallery",
    "load",
    "member_data",
    "one_graph",
    "randomize",
    "resolve",
    "tried",
    "whole_model",
]

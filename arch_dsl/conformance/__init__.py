"""Conformance: what every primitive is held to, archlab's own in its tests and yours by `archlab check-primitive`."""

from archlab.arch_dsl.conformance.seen import Seen, seen
from archlab.arch_dsl.conformance.verdicts import Verdict, check

__all__ = ["Seen", "Verdict", "check", "seen"]

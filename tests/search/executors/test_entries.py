"""What Ray starts is a process that has imported one module: it must know all that a trial may name.

Forked and inline trials find everything imported already, so that only this sees a member that is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from archlab.search.running import measure, run, smoke
from tests.search.study_kit import ROOT

TOLD = """
import json, sys
from importlib import import_module
from archlab.arch_dsl.language.spec import Family
import_module(sys.argv[1])
print(json.dumps({f"{kind.__module__}:{kind.__name__}": sorted(kind.members) for kind in Family.__subclasses__()}))
"""


@pytest.mark.parametrize(
    "entry", [run.ENTRY, *(pytest.param(e, marks=pytest.mark.slow) for e in (smoke.ENTRY, measure.ENTRY))]
)
def test_an_entry_alone_knows_every_member_of_its_families(entry: str) -> None:
    module, _, _ = entry.partition(":")
    command = [sys.executable, "-c", TOLD, module]
    told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert len(told) > 5
    for family, members in told.items():
        home, _, name = family.partition(":")
        ours = getattr(sys.modules[home], name).members
        builtin = [each for each, member in ours.items() if member.__module__.startswith("archlab.")]
        assert set(members) == set(builtin), f"{module} must import the home of all of {family}"

"""`archlab check-primitive` finds what is wrong with a primitive, says which property, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from archlab.arch_dsl.conformance.hosts import Case, cases_of
from archlab.arch_dsl.conformance.properties import PROPERTIES, one_graph
from archlab.arch_dsl.language import plugins
from archlab.cli.main import main
from tests.arch_dsl.language.test_plugins import GAIN


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No plug-in outlives its test."""
    yield
    for plugin in plugins.loaded():
        plugins.unload(plugin)


def check(folder: Path, text: str, *options: str) -> Result:
    (folder / "my_gate.py").write_text(text)
    return CliRunner().invoke(main, ["check-primitive", str(folder / "my_gate.py"), *options])


def wrong(result: Result) -> dict[str, str]:
    """Property to complaint, of the lines that say so."""
    lines = [line.split("  wrong  ")[1] for line in result.output.splitlines() if line.startswith("  wrong  ")]
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.slow
def test_what_is_right_gets_a_line_per_property(tmp_path: Path) -> None:
    result = check(tmp_path, GAIN)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("tanh_gain  y' = y * tanh(a) with a learned a per channel.\n")
    for name in ("looks only back", "costs are exact", "every field changes the result", "layers can share it"):
        assert f"  ok     {name}\n" in result.output
    assert result.output.endswith("my_gate.py: all properties hold\n")


PRECISIONS, GRADIENTS = "float32 on fast kernels agrees with float64", "gradients reach every parameter"
FIELD = "    start: float = 0.5\n"
WRONG = [
    ("ignored field", FIELD, FIELD + "    loud: bool = False\n", "every field changes the result", "loud"),
    ("cost", "Cost(parameters=ctx.width)", "Cost(parameters=1)", "costs are exact", "the module has"),
    ("future", "y * self.gain.tanh()", "y.roll(-1, 1) * self.gain.tanh()", "looks only back", "earlier logits"),
    ("other rows", "y * self.gain.tanh()", "y.flip(0) * self.gain.tanh()", "looks only back", "another sequence"),
    (
        "shape",
        "y * self.gain.tanh()",
        "(y * self.gain.tanh()).float()",
        "float32 on fast kernels agrees with float64",
        "double",
    ),
    (
        "dead",
        "y * self.gain.tanh()",
        "y * 2 + 0 * call.positions_of(3, y.device)[0]",
        "gradients reach every parameter",
        "gain",
    ),
    ("graph break", "self.gain.tanh()", "(self.gain.tanh() if y.sum().item() < 9 else 1)", "one graph", ""),
]


@pytest.mark.parametrize(("old", "new", "name", "said"), [pytest.param(*case[1:], id=case[0]) for case in WRONG])
def test_what_is_wrong_is_found(tmp_path: Path, old: str, new: str, name: str, said: str) -> None:
    assert old in GAIN
    case = plain_case(tmp_path, GAIN.replace(old, new))
    holds = {**PROPERTIES, "one graph": lambda case: one_graph(case.model)}[name]
    try:
        complaint = holds(case)
    except Exception as error:
        complaint = str(error)
    assert complaint and said in complaint


def plain_case(folder: Path, text: str) -> Case:
    (folder / "my_gate.py").write_text(text)
    (member,) = plugins.load(folder / "my_gate.py").members
    return next(iter(cases_of(member)))


def test_an_exception_is_told_with_its_line(tmp_path: Path) -> None:
    result = check(tmp_path, GAIN.replace("self.gain.tanh()", "self.gian"))
    line = next(number for number, text in enumerate(GAIN.splitlines(), 1) if "self.gain.tanh()" in text)
    assert result.exit_code == 1, result.output
    assert f"my_gate.py:{line})" in wrong(result)["keeps shapes, finite"]
    assert result.output.splitlines()[-1].endswith(" do not hold")


def test_a_primitive_that_no_place_takes_is_told(tmp_path: Path) -> None:
    never = '    def check(self, ctx, path):\n        return [Problem(path, "never")]\n\n    def cost'
    text = GAIN.replace("    def cost", never)
    text = text.replace(
        "from archlab.arch_dsl.parts.families",
        "from archlab.arch_dsl.language.errors import Problem\nfrom archlab.arch_dsl.parts.families",
    )
    result = check(tmp_path, text)
    assert result.exit_code == 1 and "never" in wrong(result)["stands in a model"]


def test_a_required_field_is_taken_from_the_examples(tmp_path: Path) -> None:
    text = GAIN.replace(FIELD, "    start: float\n")
    assert "start: is missing" in wrong(check(tmp_path, text))["stands in a model"]
    plugins.unload(plugins.loaded()[0])
    text = text.replace("import annotations\n", "import annotations\n\nfrom typing import Any, ClassVar\n")
    examples = '    examples: ClassVar[Any] = ({"start": 0.5}, {"start": -1.0})\n'
    case = plain_case(tmp_path, text.replace("    start: float\n", examples + "    start: float\n"))
    assert [other.id for other in case.others()] == ["tanh_gain--1.0"]


def test_json_is_json_alone(tmp_path: Path) -> None:
    found = json.loads(check(tmp_path, GAIN, "--json").output)
    assert {verdict["complaint"] for verdict in found["tanh_gain"]} == {""}


def test_a_family_of_recipes_is_no_primitive(tmp_path: Path) -> None:
    text = (
        "from archlab.search.recipe.schedules import Schedule\n\n\n@Schedule.register('mine')\nclass Mine(Schedule):\n"
        '    """Constant."""\n\n    def factor(self, step, steps):\n        return 1.0\n'
    )
    result = check(tmp_path, text)
    assert result.exit_code == 2 and "registers no primitive of a model" in result.output

"""The documentation is under test: nothing that a user can write is missing, and what is written is so."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import click
import pytest

from archlab import arch_dsl
from archlab.arch_dsl.catalogue.describe import FAMILIES as PRIMITIVES
from archlab.arch_dsl.catalogue.page import markdown
from archlab.arch_dsl.language.parse import parse, parse_value
from archlab.arch_dsl.language.source import read, read_text
from archlab.arch_dsl.language.spec import Family, FieldType, Spec, alternatives, families, fields_of
from archlab.arch_dsl.model.model import DecoderModel, EncoderDecoderModel
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.weights.layout import Layout
from archlab.cli.main import main
from archlab.search.recipe.recipe import Recipe
from archlab.search.sections.prune.spec import Pruner
from archlab.search.sections.search.axes import KINDS
from archlab.search.sections.search.samplers import Sampler
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from tests.docs_kit import (
    PAGES,
    ROOT,
    TEMPLATE,
    Block,
    anchors,
    answer,
    bare,
    blocks,
    examine,
    inline,
    names,
    plugins_of,
    tables,
)

REFERENCE = ROOT / "docs" / "reference"
STUDIES, MODELS = (sorted((REFERENCE / name).glob("*.md")) for name in ("study", "model"))
PAGE_IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)


# Keys, types and defaults


def keys_of(cls: type[Spec], prefix: str = "") -> Iterator[tuple[str, FieldType]]:
    """Path and field of every key of a section and of the sections in it; a model has a page of its own."""
    for name, item in fields_of(cls).items():
        yield f"{prefix}{name}", item
        annotated = typing.get_origin(item.annotation) is typing.Annotated
        for kind in alternatives(typing.get_args(item.annotation)[0] if annotated else item.annotation):
            section = isinstance(kind, type) and issubclass(kind, Spec) and not issubclass(kind, Family)
            if section and (getattr(kind, "short_forms", ()) or not hasattr(kind, "parse_node")):
                yield from keys_of(kind, f"{prefix}{name}.")


def text_of(pages: list[Path]) -> str:
    """The text of some pages, one after the other."""
    return "\n".join(page.read_text() for page in pages)


def documented_keys(pages: list[Path]) -> dict[str, str]:
    """Key to default, from the tables of keys."""
    rows = [row for table in tables(text_of(pages)) if table.header[0] == "key" for row in table.rows]
    found = {bare(row[0]): bare(row[2]) for row in rows}
    assert len(found) == len(rows), "a key is documented twice"
    return found


def documented_members(pages: list[Path]) -> dict[str, dict[tuple[str, str], str]]:
    """Per family, as its table's first column is called: (member or "all", key) to default."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for table in tables(text_of(pages)):
        if table.header[1:3] == ("key", "type"):
            entries = found.setdefault(bare(table.header[0]), {})
            for members, keys, _, default, _ in table.rows:
                for member in names(members) or [members]:
                    for key in names(keys):
                        assert (member, key) not in entries, f"{member} {key} is documented twice"
                        entries[member, key] = bare(default)
    return found


def assert_default(written: str, item: FieldType) -> None:
    """The default in a table, read as a study file would be, is the one of the code."""
    if item.required:
        assert written == "required", item.name
        return
    problems: list[Any] = []
    assert parse_value(item.annotation, read_text(written), item.name, problems) == item.default, item.name
    assert problems == []


@pytest.mark.parametrize(
    ("pages", "kinds"), [(STUDIES, [Study]), (MODELS, [EncoderDecoderModel, DecoderModel])], ids=["study", "model"]
)
def test_every_key_is_documented_with_its_default_and_no_other(pages: list[Path], kinds: list[type[Spec]]) -> None:
    documented, keys = documented_keys(pages), {key: item for kind in kinds for key, item in keys_of(kind)}
    assert sorted(documented) == sorted(keys)
    for key, item in keys.items():
        assert_default(documented[key], item)


CHOICES = ("data", "tokenizer", "objective", "optimizer", "schedule")
FAMILIES: dict[str, tuple[list[Path], type[Family]]] = {
    **{f"train.{name}": (STUDIES, families(fields_of(Recipe)[name].annotation)[0]) for name in CHOICES},
    "prune": (STUDIES, Pruner),
    "search.sampler": (STUDIES, Sampler),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_member_of_a_family_is_documented_with_its_fields_and_defaults(name: str) -> None:
    pages, family = FAMILIES[name]
    documented = documented_members(pages).get(name, {})
    fields = {(m, key): item for m, member in family.members.items() for key, item in fields_of(member).items()}
    for (member, key), item in fields.items():
        said = [documented[who, key] for who in (member, "all") if (who, key) in documented]
        assert len(said) == 1, f"{member}.{key} is documented {len(said)} times"
        assert_default(said[0], item)
    assert {key for _, key in documented} <= {key for _, key in fields}
    assert {member for member, _ in documented} <= {*family.members, "all"}
    assert set(family.members) <= {word for text in inline(text_of(pages)) for word in re.findall(r"\w+", text)}


def test_the_page_of_primitives_is_what_the_registry_makes() -> None:
    page = (REFERENCE / "primitives.md").read_text()
    assert page == markdown(), "make docs"
    for kind in PRIMITIVES:
        for name, member in kind.members.items():
            assert f"### `{name}`" in page
            assert all(f"| `{field}` |" in page for field in fields_of(member))
        assert all(f"### `{alias}`" in page for alias in kind.aliases)


def test_every_site_of_a_branch_is_documented() -> None:
    (table,) = [table for table in tables(text_of(MODELS)) if table.header[0] == "site"]
    said = {site for row in table.rows for site in names(row[0])}
    fields = [item for member in Branch.members.values() for item in fields_of(member).values()]
    others = ("branches", "balance")
    assert said == {item.name for item in fields if families(item.annotation) and item.name not in others}


def test_every_axis_of_a_space_is_documented() -> None:
    documented = documented_members(STUDIES)["space"]
    for name, kind in KINDS.items():
        said = {key: default for (who, key), default in documented.items() if who in (name, "all")}
        assert sorted(said) == sorted(kind.keys)
        for key, item in fields_of(kind).items():
            if key in said:
                assert_default(said[key], item)
    assert {who for who, _ in documented} == {*KINDS, "all"}


def test_every_knob_is_documented() -> None:
    (table,) = [table for table in tables(text_of(MODELS)) if table.header[0] == "knob"]
    assert sorted(bare(row[0]) for row in table.rows) == sorted(knob.name for knob in KNOBS)


# Examples and answers


def refusals() -> list[Any]:
    """Every row of the tables of what is refused."""
    rows = [
        (page, *row)
        for page in [*STUDIES, *MODELS]
        for table in tables(page.read_text())
        if table.header[0] == "what is refused"
        for row in table.rows
    ]
    return [pytest.param(bare(set_), bare(said), id=f"{page.stem}-{bare(set_)}") for page, set_, said in rows]


@pytest.mark.parametrize(("setting", "said"), refusals())
def test_what_is_refused_is_answered_as_documented(setting: str, said: str) -> None:
    assert answer(setting) == said


def examples(language: str) -> list[Any]:
    """The fenced blocks of all pages in a language."""
    found = [(page, block) for page in PAGES for block in blocks(page.read_text()) if block.language == language]
    return [pytest.param(page, block, id=f"{page.relative_to(ROOT)}:{block.line}") for page, block in found]


@pytest.mark.parametrize(("page", "block"), examples("yaml"))
def test_yaml_examples_load(page: Path, block: Block, tmp_path: Path) -> None:
    data = read_text(block.text).plain()
    if "study" in data:
        (tmp_path / "study.yaml").write_text(block.text)
        with plugins_of(page, tmp_path):
            assert examine(load_study(tmp_path / "study.yaml", allow_plugins=True))
    elif set(data) == {"model"}:
        assert arch_dsl.resolve(arch_dsl.load(data["model"]), vocab=257, max_positions=128).vocab == 257
    elif "tensors" in data:
        assert parse(Layout, data).tensors
    else:
        assert examine(load_study(TEMPLATE, data))  # a part of a study, put into the template


@pytest.mark.parametrize(("page", "block"), examples("python"))
def test_python_examples_name_what_there_is(page: Path, block: Block) -> None:
    compile(block.text, str(page), "exec")
    for module, name in re.findall(r"\b(arch_dsl|search)\.([a-z_]+)", block.text):
        there = hasattr(import_module(module), name) or find_spec(f"{module}.{name}")
        assert there, f"{module}.{name}"


def test_models_python_examples_run() -> None:
    names_in: dict[str, Any] = {}
    for block in blocks(text_of(MODELS)):
        if block.language == "python":
            exec(block.text, names_in)
    assert names_in["resolved"].max_positions == 128
    assert names_in["state"].tokens == 6


def test_both_ways_to_write_a_model_are_one() -> None:
    first, second = [
        block for block in blocks((REFERENCE / "model" / "index.md").read_text()) if block.language == "yaml"
    ][:2]
    models = [arch_dsl.load(read_text(block.text).plain()["model"]) for block in (first, second)]
    assert len({arch_dsl.identity(arch_dsl.resolve(m, vocab=257, max_positions=128)) for m in models}) == 1


def committed_studies() -> Iterator[Any]:
    """(file, overrides) of every study at every scale; results, golden texts and published figures are no studies."""
    folders = [ROOT / "studies", ROOT / "studies" / "search"]
    for file in sorted(path for folder in folders for path in folder.glob("*.yaml")):
        for number, scale in enumerate(read(file).plain().get("scales", [None])):
            overrides = {"scale": scale} if scale else {}
            id_, marks = (f"{file.stem}-{scale}", [pytest.mark.slow] if number else []) if scale else (file.stem, [])
            yield pytest.param(file, overrides, id=id_, marks=marks)


@pytest.mark.parametrize(("file", "overrides"), list(committed_studies()))
def test_committed_studies_load_at_every_scale(file: Path, overrides: dict[str, str]) -> None:
    assert examine(load_study(file, overrides))


# Commands


def options_of(command: click.Command) -> set[str]:
    """The long options of a verb."""
    return {name for item in command.params for name in item.opts if name.startswith("--")}


def test_every_verb_is_in_the_table_of_commands_with_all_its_options() -> None:
    (table,) = [table for table in tables((REFERENCE / "commands.md").read_text()) if table.header[0] == "command"]
    said = {bare(row[0]).split()[1]: set(bare(row[1]).split()) - {"-"} for row in table.rows}
    assert said == {name: options_of(command) for name, command in main.commands.items()}  # type: ignore[attr-defined]


def commands(text: str) -> Iterator[list[str]]:
    """The `archlab` and `make` commands on a page, in words, comments left out."""
    lines = [line for block in blocks(text) if block.language in ("", "sh") for line in block.text.splitlines()]
    for line in [*lines, *inline(text)]:
        words = shlex.split(line, comments=True) if line.startswith(("archlab ", "make ")) else []
        if words:
            yield words


@every_page
def test_commands_on_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *words in commands(page.read_text()):
        if program == "make":
            stray = {word for word in words if not word.startswith("-") and "=" not in word} - targets
            assert not stray, f"make has no {stray}"
        elif words and not words[0].startswith("-"):
            verbs: dict[str, click.Command] = main.commands  # type: ignore[attr-defined]
            assert words[0] in verbs, f"archlab has no verb {words[0]}"
            given = {word.split("=")[0] for word in words if word.startswith("--")}
            assert given <= options_of(verbs[words[0]]), " ".join(words)


# The notebook


def script(path: str) -> Any:
    """A script of docs/, imported."""
    spec = spec_from_file_location(Path(path).name, ROOT / "docs" / f"{path}.py")
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_notebook_is_what_its_script_makes_and_ran_to_its_end() -> None:
    text = (ROOT / "docs" / "guides" / "python.ipynb").read_text()
    cells = json.loads(text)["cells"]
    made = script("guides/make_notebook").notebook().cells
    assert [("".join(cell["source"]), cell["cell_type"]) for cell in cells] == [(c.source, c.cell_type) for c in made]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.get("name", output["output_type"]) for cell in code for output in cell["outputs"]}
    assert kinds <= {"stdout", "execute_result", "display_data"}, "a cell failed or warned"
    assert "/tmp/" not in text and str(ROOT) not in text
    assert len(text) < 100_000


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook = script("guides/make_notebook")
    made = notebook.notebook()
    notebook.run(made)  # which raises where a cell fails
    (shown,) = [c for c in made.cells if c.source.startswith("archlab.run(")]
    assert "gates: 15 trials have a result" in shown.outputs[0]["data"]["text/html"]


# The site


def navigation(entry: Any) -> Iterator[str]:
    """The pages of an entry of the site's navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(part)


def test_the_site_is_built_and_leads_to_every_page(tmp_path: Path) -> None:
    config = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())
    led = [*navigation(config["project"]["nav"])]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert sorted(led) == sorted(pages | {"guides/python.md"})
    site = script("make_site").build(tmp_path)
    for page in led:
        assert (site / page).with_suffix(".html").exists(), page
    assert "vocab" in (site / "reference/study/train.html").read_text()
    loads = re.compile(r"<(?:script|img|iframe)[^>]*src=\"https?:|<link[^>]*stylesheet[^>]*href=\"https?:")
    assert not [page for page in site.rglob("*.html") if loads.search(page.read_text())], "it is read without a network"


MADE = tuple(
    f"reference/{name}.md" for name in ("primitives", "parity", "zoo/certain", "zoo/models")
)  # lists of all there is


@every_page
def test_a_page_has_one_idea_and_at_most_1500_words(page: Path) -> None:
    words, most = len(page.read_text().split()), 1_300 if page == ROOT / "README.md" else 1_500
    assert words <= most or page in {ROOT / "CHANGELOG.md", *(ROOT / "docs" / made for made in MADE)}


# Links and names


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(file.read_text()), f"{target}: there is no such heading"


@every_page
def test_files_and_tests_on_a_page_exist(page: Path) -> None:
    folders = "arch_dsl|kernels|search|dashboards|tests|docs|benchmarks"
    for word in inline(page.read_text()):
        found = re.fullmatch(rf"((?:{folders})/[\w./-]+)(?:::(\w+))?", word)
        if found is None:
            continue
        file = ROOT / found[1]
        assert file.exists(), word
        assert not found[2] or re.search(rf"^def {found[2]}\b", file.read_text(), re.MULTILINE), word


def test_every_variable_of_the_environment_is_documented() -> None:
    folders = ("kernels", "arch_dsl", "search", "dashboards", "tests/fuzz")
    sources = [file for name in folders for file in (ROOT / name).rglob("*.py")]
    read = {word for file in sources for word in re.findall(r"\bARCHLAB_[A-Z_]+\b", file.read_text())}
    said = {word for page in PAGES for word in re.findall(r"\bARCHLAB_[A-Z_]+\b", page.read_text())}
    assert read == said

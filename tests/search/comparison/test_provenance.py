"""A report that lies in a repository says by itself where it came from, and nothing of the machine's own names."""

from __future__ import annotations

import getpass
import json
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from archlab import arch_dsl
from archlab.dashboards.library import Library
from archlab.dashboards.paper.page import page
from archlab.search.comparison.compare import compare, load_comparison
from archlab.search.comparison.provenance import identified
from archlab.search.formatting.tables import IDENTITIES
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import FORMATS, build_page, report
from archlab.search.results.comparison import Comparison
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.trial.trial import Trial, identity_of
from tests.search.compare_kit import make_study
from tests.search.study_files import write_study

TRAIN = "train: {data: {text: corpus.txt}, tokens: 256, context: 32, batch: 4, lr: 1e-3, precision: fp32}"
SCALES = "scales:\n  small: {}\n  wide: {model: {d_model: 32}}"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a finished study, at one of its scales and with a value set for it."""
    folder = tmp_path_factory.mktemp("provenance")
    study = write_study(folder, seeds="seeds: 1", scales=SCALES, train=TRAIN)
    found = run(study, folder / "store", overrides={"train.clip": 2.0}, executor="inline", track=False)
    assert found.exit_code == 0
    return folder / "store"


@pytest.fixture(scope="module")
def found(ran: Path) -> Comparison:
    with Store.open(ran) as store:
        return load_comparison(store, "gates-small")


@pytest.fixture(scope="module")
def html(ran: Path) -> str:
    return page(Library(ran).study("gates-small"), "archlab run study.yaml")


def test_json_says_all_of_where_its_numbers_come_from(ran: Path, found: Comparison) -> None:
    told = json.loads(report(found, "json"))["provenance"]
    assert (told["study"], told["scale"], told["overrides"]) == ("gates-small", "small", {"train.clip": 2.0})
    assert (told["precision"], told["compile"], told["seeds"]) == (["fp32"], ["off"], [0])
    assert {"archlab", "torch", "python", "device", "cpu", "threads"} <= told["versions"].keys()
    today = datetime.now(UTC).date().isoformat()
    assert set(told["trained"]) == {"first", "last"} and told["trained"]["first"] <= told["trained"]["last"] <= today
    planned = plan(load_study(ran.parent / "study.yaml", {"train.clip": 2.0}), ran / "data")
    assert told["data"]["identity"] == planned.variants[0].dataset.identity
    assert {name: each["model"] for name, each in told["identities"].items()} == {
        variant.name: arch_dsl.identity(variant.model) for variant in planned.variants
    }
    assert told["identities"] == {variant.name: variant.identity for variant in planned.variants}
    assert told["identities"]["baseline"]["recipe"] == told["identities"]["gated"]["recipe"]


def test_every_form_says_it_in_short(html: str, found: Comparison) -> None:
    forms = {form: report(found, form) for form in ("md", "latex", "text")}
    forms["html"] = html
    for form, text in forms.items():
        flat = " ".join(text.replace("\\", "").split())
        said = "study gates-small at scale small with train.clip=2.0; precision fp32, compile off; trained 20"
        assert said in flat, form
        assert re.search(r"\(UTC\); data [0-9a-f]{12} \(.*; archlab \S+, .*torch \S+, python 3", flat), form
        hashes = [f"{of} {each[:12]}" for of, each in found.provenance["identities"]["gated"].items()]
        assert (f"gated: {', '.join(hashes)}" in flat) == (form != "text"), form
    assert f"<details><summary>{IDENTITIES}</summary>" in forms["md"]
    assert forms["latex"].rstrip().splitlines()[-1].startswith("% gated: model ")


def test_no_form_has_a_name_of_the_machine(ran: Path, html: str, found: Comparison) -> None:
    names = [str(ran), str(ran.parent), socket.gethostname(), f"/{getpass.getuser()}/"]
    texts = {form: report(found, form) for form in FORMATS}
    texts["html"] = html
    for form, text in texts.items():
        assert [name for name in names if name in text] == [], form
    key = found.trials["key"][0]
    assert json.loads(texts["json"])["trials"][0]["folder"] == f"trials/{key[:2]}/{key}"
    assert found.trials["folder"][0] == str(ran / "trials" / key[:2] / key), "here it is whole"


def test_a_store_of_an_older_version_reports_what_it_has(ran: Path, found: Comparison) -> None:
    with Store.open(ran) as store:
        record, trials = store.study("gates-small"), store.study_trials("gates-small")
        without = [{k: v for k, v in each.items() if k != "identity"} for each in record["variants"]]
        older = record | {"variants": without}
        again = identified(older, trials, store.spec)
        assert [each["identity"] for each in again["variants"]] == [each["identity"] for each in record["variants"]]
        choices = older | {"tune": {"lr": [1e-3], "block.attention.head_dim": [8, 16]}}
        assert all("identity" not in each for each in identified(choices, trials, store.spec)["variants"])
        assert all("identity" not in each for each in identified(older, [], store.spec)["variants"])
    nothing = compare(*make_study({"baseline": 0.0, "sdpa": -0.05}))
    told = json.loads(report(nothing, "json"))["provenance"]
    assert (told["trained"], told["identities"], "precision" in told) == ({}, {}, False)
    assert build_page(nothing).provenance.startswith("study gate-position; data 0123456789ab (stdlib, bytes;")
    assert IDENTITIES not in report(nothing, "md")


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "another rate": ({"lr": 1.0}, True),
    "another precision": ({"precision": "bf16"}, True),
    "smaller micro-batches": ({"accumulate": 2}, True),
    "compiled layers": ({"compile": "blocks"}, True),
    "another clip": ({"clip": 3.0}, False),
    "more tokens": ({"tokens": 512}, False),
    "data of a stage prepared elsewhere": ({"stages": [{"tokens": 64, "prepared": "1"}]}, True),
    "another stage": ({"stages": [{"tokens": 65, "prepared": "0"}]}, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_identity_of_a_recipe_leaves_out_what_is_tuned_or_settled_by_a_machine(name: str) -> None:
    recipe = {"lr": 0.1, "precision": "fp32", "accumulate": 1, "clip": 1.0, "tokens": 256}
    recipe["stages"] = [{"tokens": 64, "prepared": "0"}]
    change, same = CHANGES[name]
    one, other = (identity_of(Trial({"d_model": 8}, each, "data", 0)) for each in (recipe, recipe | change))
    assert one["model"] == other["model"]
    assert (one["recipe"] == other["recipe"]) == same


def test_recipes_that_differ_are_all_named() -> None:
    record, trials = make_study({"baseline": 0.0, "half": -0.05})
    record["recipe"] |= {"precision": "fp32", "compile": "blocks"}
    record["variants"][1]["changes"] = [["train.precision", "fp32", "bf16"]]
    told = compare(record, trials).provenance
    assert (told["precision"], told["compile"]) == (["bf16", "fp32"], ["blocks"])
    assert "; precision bf16 / fp32, compile blocks; " in build_page(compare(record, trials)).provenance

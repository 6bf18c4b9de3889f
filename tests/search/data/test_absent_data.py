"""A plan downloads nothing: data of the hub that are not there yet are counted without their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.search.data import Hub
from archlab.search.planning.plan import Plan, plan
from archlab.search.study.load import load_study
from tests.golden import ROOT, files

HUB = "{hf: {name: some/corpus, config: a, revision: abcdef0123, bytes: 20k, validation_bytes: 2k, test_bytes: 2k}}"
HERE = "{type: stdlib, bytes: 300k, validation_bytes: 10k, test_bytes: 10k}"
STUDY = """\
study: s
model:
  d_model: 16
  n_layers: 1
  block: {norm: rmsnorm, attention: {heads: 2, positional: rope}, ffn: {type: glu, width: 32}}
variants: {baseline: {}, gated: {block.attention.gate: {position: sdpa}}}
match: {parameters: baseline, by: block.ffn.width}
seeds: 2
evaluate: [perplexity, {needle: {lengths: [160]}}]
train: {data: DATA, tokenizer: {type: bpe, vocab: 300}, tokens: 4k, context: 32, batch: 4, lr: 3e-3}
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a network was asked for, which there is none of."""
    found: list[str] = []

    def rows(self: Hub, files: list[Path], path: str) -> Any:
        found.append(self.name)
        raise SpecError.of(f"{path}.name", "could not be opened", self.mark("name"))

    monkeypatch.setattr(Hub, "_rows", rows)
    return found


class Rows(list[dict[str, str]]):
    """A stream that knows its place."""

    def state_dict(self) -> dict[str, int]:
        return {}


def written(folder: Path, data: str, *more: str) -> Path:
    file = folder / "study.yaml"
    file.write_text(STUDY.replace("DATA", data) + "\n".join(more))
    return file


def planned(folder: Path, data: str, *more: str) -> Plan:
    return plan(load_study(written(folder, data, *more)), folder / "store" / "data")


def archlab(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--store", str(folder / "store")])


def test_models_are_those_of_data_that_are_there(tmp_path: Path, asked: list[str]) -> None:
    absent, there = planned(tmp_path, HUB), planned(tmp_path, HERE)
    assert absent.absent == ["hf: some/corpus a@abcdef0"] and there.absent == []
    sizes = [[(v.name, v.parameters, v.mismatch, v.figures) for v in each.variants] for each in (absent, there)]
    assert sizes[0] == sizes[1] and not asked
    assert [v.identity["model"] for v in absent.variants] == [v.identity["model"] for v in there.variants]


def test_a_plan_says_what_has_to_be_downloaded(tmp_path: Path, asked: list[str]) -> None:
    file = str(written(tmp_path, HUB))
    result = archlab(tmp_path, "plan", file)
    assert result.exit_code == 0, result.output
    assert "data: hf: some/corpus a@abcdef0, bpe 300\n" in result.stdout
    assert "not downloaded yet: hf: some/corpus a@abcdef0; `archlab run` does that first" in result.stdout
    assert "4 trials of 4k tokens" in result.stdout and "the table: needle_160" in result.stdout
    told = json.loads(archlab(tmp_path, "plan", file, "--json").stdout)
    assert told["data"]["absent"] and told["trials"] == told["left"] == 4
    assert archlab(tmp_path, "show", file, "--variant", "gated").exit_code == 0
    assert not asked and not (tmp_path / "store").exists()


def test_a_part_and_a_stage_may_be_absent(tmp_path: Path, asked: list[str]) -> None:
    mixed = planned(tmp_path, f"{{mixture: {{a: {HUB[:-1]}, weight: 1}}, b: {{type: stdlib, weight: 1}}}}}}")
    assert [v.dataset.absent for v in mixed.variants] == [True, True]
    assert planned(tmp_path, f"{{needles: {{haystack: {HUB}}}}}").absent == ["needles in hf: some/corpus a@abcdef0"]
    stages = f"stages: [{{tokens: 4k, lr: 1e-3, data: {HUB}}}, {{tokens: 4k, lr: 1e-3, data: {HERE}}}]"
    staged = planned(tmp_path, f"{HERE}, {stages}")
    assert not staged.variants[0].dataset.absent, "what is here is read"
    assert [stage.dataset.absent for stage in staged.variants[0].stages] == [True, True], "after tokens not known yet"
    result = archlab(tmp_path, "plan", str(tmp_path / "study.yaml"))
    assert "not downloaded yet: hf: some/corpus a@abcdef0" in result.stdout, result.output
    assert not asked


def test_a_measure_that_only_absent_data_may_fit_is_not_refused(tmp_path: Path, asked: list[str]) -> None:
    file = written(tmp_path, HERE)
    mixed = f"{{train.data: {{mixture: {{a: {HUB}, b: stdlib}}}}}}"
    text = file.read_text().replace("{block.attention.gate: {position: sdpa}}", mixed)
    file.write_text(text.replace("{needle: {lengths: [160]}}", "perplexity_by_domain").replace("match:", "#"))
    assert len(plan(load_study(file), tmp_path / "data").absent) == 1 and not asked


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{hf: {name: some/corpus}}", "train.data.revision: is missing"),
        ("{mixture: {a: {hf: {name: some/corpus}}, b: stdlib}}", "train.data.domains.a.revision: is missing"),
    ],
)
def test_what_is_wrong_without_the_text_is_refused(tmp_path: Path, asked: list[str], data: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planned(tmp_path, data)
    assert not asked


def test_what_was_downloaded_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Rows({"text": f"document {place}: " + "so it goes. " * (place % 30)} for place in range(200))
    monkeypatch.setattr(Hub, "_rows", lambda *_: texts)
    whole = plan(load_study(written(tmp_path, HUB)), tmp_path / "store" / "data", fetch=True)
    monkeypatch.setattr(Hub, "_rows", lambda *_: pytest.fail("it is there"))
    again = planned(tmp_path, HUB)
    assert again.absent == whole.absent == []
    assert [v.trial(0).key for v in again.variants] == [v.trial(0).key for v in whole.variants]


def test_a_run_waits_once_for_a_network_that_is_not_there(tmp_path: Path, asked: list[str]) -> None:
    result = archlab(tmp_path, "run", str(written(tmp_path, HUB)), "--inline", "--no-track")
    assert result.exit_code == 2 and "could not be opened" in result.output
    assert asked == ["some/corpus"], "for both variants"


def test_steps_that_are_to_be_timed_need_the_text(tmp_path: Path, asked: list[str]) -> None:
    file = written(tmp_path, HUB)
    file.write_text(file.read_text().replace("parameters: baseline", "step_time: baseline"))
    assert archlab(tmp_path, "plan", str(file)).exit_code == 2 and asked


SCALES = [(file, scale) for file in files() for scale in load_study(file).scales if scale.startswith("medium")]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "scale"), SCALES, ids=lambda value: getattr(value, "stem", value))
def test_every_study_for_a_gpu_is_planned_without_a_network(
    tmp_path: Path, asked: list[str], file: Path, scale: str
) -> None:
    made = plan(load_study(file, {"scale": scale}), tmp_path / "data")
    assert made.trials >= len(made.variants) and not asked, file.relative_to(ROOT)
    nearest = {v.base: min(abs(w.mismatch) for w in made.variants if w.base == v.base) for v in made.variants}
    assert max(nearest.values()) < 0.02, nearest  # beside what is matched some stand as they are written

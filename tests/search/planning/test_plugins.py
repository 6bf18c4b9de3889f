"""A study with a primitive of one's own: allowed or refused, trained in every kind of process, kept in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from archlab.arch_dsl.language import plugins
from archlab.cli.main import main
from archlab.search.store.store import Store
from tests.arch_dsl.language.test_plugins import GAIN
from tests.search.study_files import TINY_MODEL, write_study

STUDY = {
    "model": TINY_MODEL,
    "variants": "variants:\n  baseline: {}\n  mine: {block.attention.gate: {position: sdpa, type: tanh_gain}}",
    "train": "train: {data: {text: corpus.txt}, tokens: 256, context: 16, batch: 4, lr: 1e-2}",
    "seeds": "seeds: 1",
    "components": None,
    "grid": None,
    "match": None,
    "tune": None,
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No plug-in outlives its test."""
    yield
    forget()


def forget() -> None:
    for plugin in plugins.loaded():
        plugins.unload(plugin)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study that lists its plug-in, in a folder that is not the current one."""
    (tmp_path / "my_gate.py").write_text(GAIN)
    return write_study(tmp_path, **{**STUDY, "plugins": "plugins: [my_gate.py]"})


def archlab(*arguments: object) -> Result:
    """A command as in a process of its own: nothing is loaded before it."""
    forget()
    return CliRunner().invoke(main, [str(each) for each in arguments])


def trials(root: Path, study: str = "tiny") -> dict[str, list[str]]:
    """Variant to the keys of its complete trials."""
    found: dict[str, list[str]] = {}
    with Store.open(root, create=False) as store:
        for row in store.study_trials(study):
            assert row["state"] == "complete", row["reason"]
            found.setdefault(row["variant"], []).append(row["key"])
    return found


def name_of(study: Path) -> str:
    return next(line.split(": ")[1] for line in study.read_text().splitlines() if line.startswith("study:"))


@pytest.mark.parametrize("verb", ["plan", "run", "show"])
def test_a_study_does_not_run_code_unasked(study: Path, verb: str, tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n" + GAIN)
    result = archlab(verb, study, "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert "my_gate.py is Python that this study runs: read it, then say so with --allow-plugins" in result.output
    assert f"{study}:" in result.output, "the place is told"
    assert not (tmp_path / "executed").exists() and plugins.loaded() == ()


def test_a_study_with_a_plugin_trains_inline_and_keeps_the_source(study: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    result = archlab("run", study, "--store", root, "--allow-plugins", "--inline", "--no-track")
    assert result.exit_code == 0, result.output
    (kept,) = (root / "plugins").iterdir()
    assert kept.read_text() == GAIN and kept.name == f"my_gate-{plugins.digest_of(GAIN.encode())}.py"
    with Store.open(root, create=False) as store:
        record = store.study(name_of(study))
    assert record["plugins"] == [{"file": str(tmp_path / "my_gate.py"), "source": plugins.digest_of(GAIN.encode())}]


def test_a_file_that_was_named_needs_no_other_word(study: Path, tmp_path: Path) -> None:
    result = archlab("plan", study, "--plugin", tmp_path / "my_gate.py", "--store", tmp_path / "store")
    assert result.exit_code == 0, result.output
    assert "tanh_gain" in result.output


def test_a_study_need_not_list_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").write_text(GAIN)
    plain = write_study(tmp_path, **STUDY)
    assert "'tanh_gain' is not a gate" in archlab("plan", plain, "--store", tmp_path / "store").output
    result = archlab("plan", plain, "--plugin", tmp_path / "my_gate.py", "--store", tmp_path / "store")
    assert result.exit_code == 0, result.output


def test_a_changed_source_is_another_trial_and_is_told(study: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    run = ("run", study, "--store", root, "--allow-plugins", "--inline", "--no-track")
    assert archlab(*run).exit_code == 0
    before = trials(root, name_of(study))
    (tmp_path / "my_gate.py").write_text(GAIN.replace("start: float = 0.5", "start: float = 0.7"))
    result = archlab(*run)
    assert result.exit_code == 0, result.output
    told = "my_gate.py has changed since this study was run: its trials are new ones"
    assert told in " ".join(result.output.split())
    after = trials(root, name_of(study))
    assert after["baseline"] == before["baseline"]
    assert set(after["mine"]).isdisjoint(before["mine"])
    assert len(list((root / "plugins").iterdir())) == 2
    old = root / "plugins" / f"my_gate-{plugins.digest_of(GAIN.encode())}.py"
    result = archlab(*run, "--set", f"plugins={old}", "--json")
    events = [json.loads(line) for line in result.output.splitlines()]
    assert result.exit_code == 0 and not any(event.get("event") == "launched" for event in events)
    assert set(trials(root, name_of(study))["mine"]) == set(before["mine"])


def test_a_plugin_that_is_gone_is_told_with_its_place(study: Path, tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").unlink()
    result = archlab("run", study, "--store", tmp_path / "store", "--allow-plugins")
    assert result.exit_code == 2
    assert f"{study}:" in result.output and "cannot read the plug-in" in result.output


def test_a_mistake_in_a_plugin_is_told_with_both_places(study: Path, tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").write_text(GAIN + "\nundefined\n")
    place = f"my_gate.py:{len(GAIN.splitlines()) + 2}"
    result = archlab("plan", study, "--store", tmp_path / "store", "--allow-plugins")
    assert result.exit_code == 2
    assert f"{place}: the plug-in failed: NameError" in result.output and f"{study}:" in result.output
    result = archlab("primitives", "--plugin", tmp_path / "my_gate.py")
    assert result.exit_code == 2 and place in result.output


def test_primitives_lists_those_of_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").write_text(GAIN)
    result = archlab("primitives", "tanh_gain", "--plugin", tmp_path / "my_gate.py")
    assert result.exit_code == 0 and "y' = y * tanh(a)" in result.output


@pytest.mark.slow
def test_a_plugin_trains_in_the_processes_of_ray(study: Path, tmp_path: Path) -> None:
    inline, ray = tmp_path / "inline", tmp_path / "ray"
    for root, options in ((inline, ("--inline",)), (ray, ())):
        result = archlab("run", study, "--store", root, "--allow-plugins", "--no-track", *options)
        assert result.exit_code == 0, result.output
    assert trials(inline, name_of(study)) == trials(ray, name_of(study))
    for root in (inline, ray):
        assert not list(root.glob("trials/**/error.txt"))

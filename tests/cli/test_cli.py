"""The command line: what every verb prints, that JSON is JSON alone, exit codes, and that help is light."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.cli.main import main
from archlab.search.store.lock import StudyLock
from tests.search.study_files import TINY_MODEL, write_study

ROOT = Path(__file__).parents[2]
TINY = {
    "model": TINY_MODEL,
    "train": "train: {data: {text: corpus.txt}, tokens: 256, context: 16, batch: 4, lr: 1e-2}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a study in it, and no store named by the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHLAB_STORE", raising=False)
    write_study(tmp_path, **TINY)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a study that was run to its end."""
    place = tmp_path_factory.mktemp("trained")
    write_study(place, **TINY)
    before = Path.cwd()
    os.chdir(place)
    try:
        result = archlab("run", "study.yaml", "--inline", "--no-track")
        assert result.exit_code == 0, result.output
        yield place
    finally:
        os.chdir(before)


def archlab(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def parsed(*arguments: str) -> Any:
    result = archlab(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


VERBS = ["dashboard", "diff", "doctor", "init", "plan", "primitives", "report", "run", "show", "status"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    assert set(VERBS) <= set(main.commands)
    result = archlab(verb, "--help")
    assert result.exit_code == 0 and "Usage:" in result.stdout and "--help" in result.stdout


def test_help_status_and_completion_import_nothing_heavy(folder: Path) -> None:
    code = """
import sys
from click.testing import CliRunner
from archlab.cli.main import main
for arguments in (["--help"], ["--version"], ["run", "--help"], ["status"]):
    CliRunner().invoke(main, arguments)
heavy = {"torch", "ray", "optuna", "mlflow", "pandas", "numpy", "scipy", "dash", "triton"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)


@pytest.mark.parametrize(
    ("file", "name"),
    [("gates.yaml", "gates"), ("My Study 2.yaml", "my-study-2"), ("Übung.yaml", "bung"), ("研究.yaml", "my-study")],
)
def test_written_template_is_a_study_that_can_be_planned(file: str, name: str, folder: Path) -> None:
    result = archlab("init", file)
    assert result.exit_code == 0 and f"wrote {file}" in result.stdout
    plan = parsed("plan", file, "--set", "train.data={text: corpus.txt}")
    assert plan["study"] == name
    assert all(abs(variant["mismatch"]) < 0.01 for variant in plan["variants"])
    again = archlab("init", file)
    assert (again.exit_code, again.stderr) == (2, f"{file} exists; a study is never overwritten\n")


def test_init_into_no_folder_is_told(folder: Path) -> None:
    result = archlab("init", "none/study.yaml")
    assert (result.exit_code, result.stderr) == (2, "none is no folder\n")


def test_plan_shows_variants_sizes_and_trials(folder: Path) -> None:
    printed = archlab("plan", "study.yaml").stdout
    plan = parsed("plan", "study.yaml")
    assert [variant["name"] for variant in plan["variants"]] == ["baseline", "gated"]
    for variant in plan["variants"]:
        assert f"{variant['parameters']:,}" in printed
    assert "block.attention.sdpa: [] → [gate]" in printed
    assert "2 variants x 2 seeds: 4 trials of 256 tokens (4 steps of 4 x 16)" in printed
    assert printed.splitlines()[-1] == "nothing was trained"
    assert plan["trials"] == 4 and plan["estimate"]["wall_s"] > 0
    assert not (folder / ".archlab" / "trials").exists()


def test_brackets_are_text_and_no_markup(folder: Path) -> None:
    write_study(
        folder,
        **{**TINY, "train": TINY["train"].replace("corpus.txt", "'[c]orpus.txt'")},
        question="question: Is [bold]this[/] a question[/x]?",
        grid="grid:\n  block.norm.placement: [pre, post]",
    )
    printed = archlab("plan", "study.yaml").stdout
    assert "Is [bold]this[/] a question[/x]?" in printed
    assert "gated [placement=post]" in printed and "text: [c]orpus.txt" in printed
    shown = archlab("show", "study.yaml", "--kernels", "--variant", "gated [placement=post]").stdout
    assert shown.startswith("gated [placement=post] on cpu, float32")


def test_a_diagram_shows_what_a_variant_adds_to_its_baseline(folder: Path) -> None:
    write_study(folder, **TINY, grid="grid:\n  block.norm.placement: [pre, post]")
    drawn, plain = (
        archlab("show", "study.yaml", "--variant", f"{name} [placement=post]", "--dot").stdout
        for name in ("gated", "baseline")
    )
    assert drawn.startswith("digraph") and ".sdpa: added" in drawn and "FLOPs per token" in drawn
    assert "removed" not in drawn, "the placement is that of its own baseline"
    assert not any(state in plain for state in ("added", "removed", "changed"))
    assert "--dot prints a diagram alone" in archlab("show", "study.yaml", "--dot", "--json").output


def test_set_replaces_values(folder: Path) -> None:
    plan = parsed("plan", "study.yaml", "--set", "seeds=5", "--set", "train.tokens=2k", "--set", "tune={lr: [1e-3]}")
    assert (plan["seeds"], plan["tokens"], plan["tune"], plan["trials"]) == ([0, 1, 2, 3, 4], 2000, {"lr": [1e-3]}, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "none.yaml"], "cannot read none.yaml: No such file or directory"),
        (["plan", "study.yaml", "--set", "seeds"], "'seeds' is not PATH=VALUE"),
        (["plan", "study.yaml", "--set", "seeds=0"], "seeds: must be at least 1, found 0"),
        (["plan", "study.yaml", "--set", "seeds=["], "--set seeds:2:1: this is not YAML"),
        (
            ["run", "study.yaml", "--inline", "--set", "trian.lr=1"],
            "'trian' is not a key of study; did you mean 'train'?",
        ),
        (
            ["show", "study.yaml", "--variant", "gatd"],
            "'gatd' is not a variant; did you mean 'gated'? (baseline, gated)",
        ),
        (["show", "study.yaml", "--device", "sm_9x"], "--device: a device must be cpu, cuda or sm_<capability>"),
        (["primitives", "gaet"], "'gaet' is not a primitive; did you mean 'gate'?"),
        (["status"], "no store at"),
        (["report", "study.yaml"], "no store at"),
        (["report", "gates", "--format", "htm"], "'htm' is not one of text, md, latex, csv, json"),
        (["plna", "study.yaml"], "No such command 'plna'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_a_message_and_exits_with_2(arguments: list[str], message: str, folder: Path) -> None:
    result = archlab(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (folder / ".archlab").exists() or not (folder / ".archlab" / "trials.db").exists()


def test_several_mistakes_are_counted(folder: Path) -> None:
    result = archlab("plan", "study.yaml", "--set", "seeds=0", "--set", "question=[1]")
    assert result.stderr.endswith("2 problems; nothing was trained\n")


@pytest.mark.parametrize("arguments", [[], ["--kernels"], ["--kernels", "--device", "sm_90"]], ids=str)
def test_show_prints_the_model_and_its_kernels(arguments: list[str], folder: Path) -> None:
    assert archlab("show", "study.yaml", "--variant", "gated", *arguments).exit_code == 0
    found = parsed("show", "study.yaml", "--variant", "gated", *arguments)
    if arguments:
        assert {"path", "op", "implementation", "reason"} <= found[0].keys()
    else:
        assert found["spec"]["block"][0]["sdpa"][0]["type"] == "gate"
        total, *parts = found["nodes"]
        for name in ("parameters", "activations", "cache"):
            assert total[name] == sum(node[name] for node in parts if node["depth"] == 1) > 0
        assert found["figures"]["activation_bytes"] == 4 * total["activations"]


def test_show_names_the_layers_whose_kernels_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = "{norm: rmsnorm, attention: {type: gla, heads: 4}, ffn: {type: glu}}"
    other = "overrides: {'3::4': {block.attention: {type: attention, heads: 4}}}"
    Path("model.yaml").write_text(f"{{d_model: 32, n_layers: 4, vocab: 9, block: {block}, {other}}}")
    rows = [line.split()[:2] for line in archlab("show", "model.yaml", "--kernels").stdout.splitlines()]
    assert ["block[0-2].attention", "linear_recurrence"] in rows
    assert ["block[3].attention", "attention"] in rows
    assert ["block.ffn", "glu"] in rows


def test_show_names_the_parameters_as_checkpoints_do_and_equal_layers_once(folder: Path) -> None:
    model = zoo.load("t5", "tiny")
    printed = archlab("show", "t5/tiny", "--parameters").stdout.splitlines()
    rows = [line.split() for line in printed[1:-2]]
    assert ["encoder.block.{0-1}.ffn.pre.rmsnorm.weight", "32", "2", "×", "32"] in rows
    bias, shape, count = rows[[row[0].startswith("decoder.block.0.") for row in rows].index(True)]
    assert (shape, count) == ("32×2", "64") and "t5_buckets" in bias  # the first layer's, which all share
    counts = [int(row[-1].replace(",", "")) * (int(row[2]) if "×" in row else 1) for row in rows]
    assert sum(counts) == arch_dsl.cost(arch_dsl.resolve(model)).parameters
    named = parsed("show", "t5/tiny", "--parameters")["parameters"]
    assert sum(map(math.prod, named.values())) == sum(counts)


def test_show_prints_what_every_node_costs(folder: Path) -> None:
    printed = archlab("show", "study.yaml", "--cost").stdout.splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in printed if line.startswith("  ")}
    assert rows["attention"] == "1,040 2.59k 7.36 kB 2.05 kB"
    assert rows["attend"] == "544 4.22 kB 2.05 kB"  # q, k, v and the output, a log-sum-exp per head; k and v
    assert "parameters, " in printed[-3] and printed[-2].endswith("128 B of cache per token, in float32")
    assert archlab("show", "study.yaml").stdout.splitlines()[-3:] == printed[-3:]


def test_primitives_lists_and_explains(folder: Path) -> None:
    listing = parsed("primitives")
    printed = archlab("primitives").stdout
    for members in listing.values():
        for name in members:
            assert f"  {name} " in printed
            (*_, facts) = parsed("primitives", name)
            assert facts["doc"] and facts["fields"] is not None
            assert archlab("primitives", name).exit_code == 0


def test_doctor_finds_something_out(folder: Path) -> None:
    result = archlab("doctor", "--json")
    found = json.loads(result.stdout)
    assert {"name", "status", "detail", "meaning"} == found[0].keys()
    assert result.exit_code == int(any(each["status"] == "fail" for each in found))


def test_run_prints_json_lines_alone_and_trains_nothing_twice(trained: Path) -> None:
    result = archlab("run", "study.yaml", "--inline", "--no-track", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert (result.exit_code, result.stderr) == (0, "")
    assert [event["event"] for event in events] == ["plan", "settled", "study", "summary"]
    assert events[-1]["counts"] == {"complete": 4, "reused": 4}


def test_run_says_what_to_type_next(trained: Path) -> None:
    result = archlab("run", "study.yaml", "--inline", "--no-track", "--store", ".archlab")
    assert result.stdout.splitlines()[-2:] == ["  archlab report study.yaml", "  archlab dashboard"]
    result = archlab("run", "study.yaml", "--inline", "--no-track", "--store", "another", "--set", "study=other")
    told = result.stdout.splitlines()
    assert "  archlab report other --store another" in told, "the file's own name is that of another study"


@pytest.mark.parametrize("format_", ["text", "md", "latex", "csv", "json"])
@pytest.mark.parametrize("study", ["study.yaml", "gates"])
def test_report_takes_a_file_or_a_name_in_every_format(study: str, format_: str, trained: Path) -> None:
    result = archlab("report", study, "--format", format_)
    assert result.exit_code == 0 and "gated" in result.stdout
    assert not result.stdout.endswith("\n\n")
    if format_ == "json":
        assert json.loads(result.stdout) == parsed("report", study)


def test_status_tells_how_far_studies_are(trained: Path) -> None:
    assert archlab("status").stdout.startswith("gates  4 trials: 4 complete  ")
    (found,) = parsed("status", "study.yaml")
    assert (found["name"], found["counts"], found["holder"]) == ("gates", {"complete": 4}, None)
    missing = archlab("status", "gatse")
    assert missing.exit_code == 2 and "has no study 'gatse'; did you mean 'gates'? (known: gates)" in missing.stderr


def test_second_driver_is_refused_with_the_name_of_the_first(trained: Path) -> None:
    store = trained / ".archlab"
    with StudyLock(store, "gates"):
        result = archlab("run", "study.yaml", "--inline", "--no-track")
        assert result.exit_code == 3
        assert str(os.getpid()) in result.stderr
        (found,) = parsed("status")
        assert found["holder"]["pid"] == os.getpid()


def test_spent_budget_exits_with_3_and_the_same_command_goes_on(folder: Path) -> None:
    first = archlab("run", "study.yaml", "--inline", "--no-track", "--set", "budget.trials=3")
    assert first.exit_code == 3 and "the budget of 3 trials is spent" in first.stdout
    second = archlab("run", "study.yaml", "--inline", "--no-track", "--json")
    assert second.exit_code == 0
    assert json.loads(second.stdout.splitlines()[-1])["counts"] == {"complete": 4, "reused": 3}


def test_unusable_store_exits_with_75(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "store" / "store.json").write_text("{}")
    result = archlab("status", "--store", "store")
    assert result.exit_code == 75 and "store.json can't be read" in result.stderr
    (folder / "store" / "store.json").write_text('{"version": 99}')
    newer = archlab("run", "study.yaml", "--store", "store", "--inline")
    assert newer.exit_code == 2 and "says version 99" in newer.stderr


def test_failed_trials_exit_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archlab.search.running.run.ENTRY", "tests.search.toy_trainer:train")
    result = archlab("run", "study.yaml", "--inline", "--no-track")  # the toy knows no such recipe
    assert result.exit_code == 1 and "failed" in result.stdout


def test_interrupted_run_exits_with_130_and_goes_on(folder: Path) -> None:
    code = """
import os, signal, sys
import archlab.search.running.driver as driver
from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.cli.main import main
commit = driver._Driver.commit
def interrupted(self, finished):
    commit(self, finished)
    os.kill(os.getpid(), signal.SIGINT)
driver._Driver.commit = interrupted
main(["run", "study.yaml", "--inline", "--no-track"])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 130, ended.stderr
    assert "interrupted; the same command goes on from here" in ended.stdout
    (found,) = parsed("status")
    assert found["counts"] == {"complete": 1, "planned": 3}
    assert archlab("run", "study.yaml", "--inline", "--no-track").exit_code == 0


def test_version_works_in_a_checkout() -> None:
    assert archlab("--version").stdout.startswith("archlab")


@pytest.mark.parametrize("strict", [False, True], ids=["as-it-is", "strict"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [b"plan", b"study.yaml", b"--set", b"train.tokens=\xff"],
            r"'train.tokens=\xff' after --set is not UTF-8 text",
        ),
        ([b"run", b"study.yaml", b"--set=\xff=1"], r"'--set=\xff=1' is not UTF-8 text"),
        ([b"plan", b"\xff.yaml"], r"'\xff.yaml' is not UTF-8 text"),
        ([b"run", b"\xff.yaml"], r"'\xff.yaml' is not UTF-8 text"),
        ([b"run", b"study.yaml", b"--store", b"a\xff"], r"'a\xff' after --store is not UTF-8 text"),
        ([b"report", b"study", b"--store", b"a\xff"], r"'a\xff' after --store is not UTF-8 text"),
    ],
    ids=["value", "path", "plan", "run", "store", "report"],
)
def test_bytes_that_are_no_text_are_refused_by_argument(
    folder: Path, arguments: list[bytes], told: str, strict: bool
) -> None:
    environment = {**os.environ, **({"PYTHONIOENCODING": "utf-8:strict"} if strict else {})}
    command = [sys.executable, "-c", "from archlab.cli.main import main; main()", *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert found.returncode == 2, found.stderr
    assert told in found.stderr and "Traceback" not in found.stderr
    assert not (folder / ".archlab").exists()


@pytest.mark.parametrize("verb", [("run", "study.yaml", "--inline"), ("calibrate", "study.yaml"), ("status",), ()])
def test_a_store_that_is_no_text_is_refused_wherever_it_was_named(folder: Path, monkeypatch, verb) -> None:
    monkeypatch.setenv("ARCHLAB_STORE", "a\udcff")
    refused = archlab(*verb)
    assert refused.exit_code == 2, refused.output
    assert refused.stderr == f"{folder}/a\\xff is not UTF-8 text: name a store folder that is, with --store\n"


def test_names_of_files_that_are_no_text_are_printed_with_escapes(folder: Path) -> None:
    (folder / "study.yaml").rename(folder / "\udcff.yaml")
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from archlab.cli.main import main; main()"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=strict)
    assert (found.returncode, r"archlab plan '\udcff.yaml'" in found.stdout) == (0, True), found.stderr

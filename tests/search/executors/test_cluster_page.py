"""The page about clusters: its script is bash, its options exist, and its links lead somewhere."""

import re
import subprocess

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language.spec import fields_of
from archlab.cli.main import main
from archlab.search.executors.resources import Resources
from tests.search.study_kit import ROOT

PAGE = "".join((ROOT / "docs" / "guides" / name).read_text() for name in ("cluster.md", "slurm.md"))


def test_every_script_of_the_page_is_bash(tmp_path):
    scripts = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    assert any(script.startswith("#!/bin/bash\n#SBATCH") for script in scripts)
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_the_script_sends_the_job_back_when_it_was_terminated(tmp_path):
    """Its end, with stand-ins for the driver and for SLURM: SIGTERM reaches the driver, whose code decides."""
    (script,) = re.findall(r"```bash\n#!/bin/bash\n(.*?)```", PAGE, re.S)
    end = script[script.index("driver=$!") :]
    end = end.replace("code=0\n", "code=0\nuntil [ -e up ]; do sleep 0.02; done\necho ready\n", 1)
    driver = "(trap 'sleep 0.3; exit {code}' TERM; touch up; while :; do sleep 0.05; done) &\n"
    slurm = 'scontrol() { echo "$@" >> requeued; }\nSLURM_JOB_ID=7\n'
    for code, requeued in ((143, True), (75, True), (1, False)):
        for left in tmp_path.iterdir():
            left.unlink()
        text = slurm + driver.format(code=code) + end
        with subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as job:
            assert job.stdout.readline() == "ready\n"
            job.terminate()
            job.communicate(timeout=240)
        assert job.returncode == code
        assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_the_options_of_the_page_exist(verb):
    shown = CliRunner().invoke(main, [verb, "--help"]).output
    for option in {"run": ("--address", "--smoke", "--store"), "plan": ("--address",)}[verb]:
        assert option in shown


def test_every_resource_is_on_the_page():
    for name in fields_of(Resources):
        assert f"| `{name}` |" in PAGE

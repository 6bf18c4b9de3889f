"""bfloat16 in Triton's interpreter: wrong as it comes, right with the fix."""

import os
import subprocess
import sys
from pathlib import Path


def test_bfloat16_is_wrong_without_the_fix_and_exact_with_it() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("bfloat16_probe.py"))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    before, after = ([float(x) for x in line.split()] for line in ran.stdout.splitlines())
    assert all(error > 1e-3 for error in before), "the interpreter computes bfloat16 now: remove the fix"
    assert after[0] == after[1] == after[3] == 0.0
    assert after[2] < 1e-5


def test_fix_leaves_a_process_without_the_interpreter_alone() -> None:
    program = "import sys; from kernels import interpret; interpret.apply(); assert 'triton' not in sys.modules"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, check=True, timeout=240)

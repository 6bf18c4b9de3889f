"""Coverage-guided fuzzing: an input that reaches code which none before has reached is kept, and changed further.

    pip install atheris
    python -m tests.fuzz.coverage yaml --minutes 60
    python -m tests.fuzz.coverage studies --minutes 60
    python -m tests.fuzz.coverage formulas --minutes 60

An input has to end with an answer, or with an error that names the place, within 5 s of the CPU and 1 GB. One that does
not is written to `build/fuzz/<target>/found`, once for each line of ours that failed, and the others go on. All that
reach new code are in `build/fuzz/<target>/corpus`, from which the next run begins.

`--pick` writes those to `tests/fuzz/corpus` that reach lines which no committed study reaches. A test tries them again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
CORPUS = Path(__file__).with_name("corpus")
CPU_S, MEMORY_MB = 5.0, 1000
_MOST_PICKED = 30_000  # bytes of a corpus
_MOST_SEED, _MOST_YAML = 4096, 1500  # bytes of a seed, and of what is made of it
_SLOW_BYTES = 250  # of a file that is written again, and read without libyaml as well: either takes ten times as long

Check = Callable[[bytes], None]


def check_yaml(folder: Path) -> Check:
    """The bytes of a file are read as a tree, with libyaml and without, or refused where they are wrong. What is
    written of the tree reads as the same."""
    import yaml

    from archlab.arch_dsl.language import source
    from archlab.arch_dsl.language.errors import SpecError
    from tests.fuzz.fuzz_kit import says_where

    file, fast = folder / "study.yaml", source._Loader

    def reads(data: bytes, loader: type) -> None:
        file.write_bytes(data)
        source._Loader = loader
        try:
            tree = source.read(file)
            if len(data) <= _SLOW_BYTES:
                assert source.read_text(source.written(tree)).plain() == tree.plain()
        except SpecError as error:
            says_where(error)
        finally:
            source._Loader = fast

    def check(data: bytes) -> None:
        reads(data, fast)
        if len(data) <= _SLOW_BYTES:
            reads(data, yaml.SafeLoader)

    return check


def check_studies(folder: Path) -> Check:
    """The bytes of a study's file load as a study, or are refused where they are wrong."""
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.search.study.load import load_study
    from tests.fuzz.fuzz_kit import says_where

    file = folder / "study.yaml"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            load_study(file, store=folder / "store")
        except SpecError as error:
            says_where(error)

    return check


def check_formulas(_: Path) -> Check:
    """A text is refused, or computes a number for each. A model with it is compiled and written out as a program, for
    the first formula of each shape."""
    import torch

    from archlab import arch_dsl
    from archlab.arch_dsl.language.formula import normal_form
    from archlab.kernels import ACTIVATIONS
    from tests.fuzz.test_formulas import evaluated, model_with

    torch.set_num_threads(1)
    shapes: set[str] = set()

    def check(data: bytes) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return
        if evaluated(text) is None:
            return
        shape = text if text in ACTIVATIONS else re.sub(r"value=[^)]*", "", ast.dump(ast.parse(normal_form(text))))
        if shape in shapes:
            return
        shapes.add(shape)
        model = arch_dsl.resolve(arch_dsl.load(model_with(text)), max_positions=4)
        logits = arch_dsl.compile(model)(torch.tensor([[0, 1, 2]]))
        logits.sum().backward()
        compile(arch_dsl.to_python(model), "<program>", "exec", dont_inherit=True)

    return check


TARGETS: dict[str, Callable[[Path], Check]] = {
    "yaml": check_yaml,
    "studies": check_studies,
    "formulas": check_formulas,
}


def seeds(target: str) -> list[bytes]:
    """What a run begins with: the committed studies and parts of wrong ones, or the formulas of the tests."""
    from tests.fuzz.mutations import study_bytes, wrong_sections
    from tests.search.study_files import study_text

    if target in ("yaml", "studies"):
        wrong: Iterable[str] = wrong_sections()
        if target == "studies":
            wrong = (study_text(**{re.split(r"\W", each)[0]: each}) for each in wrong)
        found = {*study_bytes(), *(each.encode() for each in wrong)}
        return sorted(each for each in found if len(each) <= (_MOST_SEED if target == "studies" else _MOST_YAML))
    texts = set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        strings = re.findall(r'"([^"\n]*\bx\b[^"\n]*)"', file.read_text())
        texts |= {each for each in strings if len(each) < 80 and re.search(r"[-+*/()]", each)}
    return sorted(each.encode() for each in texts)


def words(target: str) -> list[bytes]:
    """Pieces that are put in as a whole."""
    from archlab.arch_dsl.language.formula import FUNCTIONS
    from tests.fuzz import mutations
    from tests.fuzz.fuzz_kit import EXTREMES

    if target == "formulas":
        return [
            each.encode() for each in (*FUNCTIONS, "(x)", "**2", "**-1", "*x", "/x", "+1", "-x", ">x", "1e308", "9**9")
        ]
    extremes = [str(each).encode() for each in EXTREMES if len(str(each)) < 40]
    keys = [f"{each}: ".encode() for each in mutations.words()]
    return [each for each in (*mutations.PIECES, *keys, *extremes) if each and len(each) <= 64]


@contextmanager
def bounded_cpu() -> Iterator[None]:
    """Ends with TooMuchWork after 5 s of the CPU: what a busy machine leaves a process does not count."""
    from tests.fuzz.fuzz_kit import TooMuchWork

    def stop(_: int, __: FrameType | None) -> None:
        raise TooMuchWork(f"more than {CPU_S:.0f} s of the CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def failing_line(error: BaseException) -> str:
    """The kind of an exception, and the last line of ours that it came through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if str(ROOT) in each.filename]
    last = next((each for each in reversed(frames) if "/tests/" not in each.filename), frames[-1])
    return f"{type(error).__name__} {Path(last.filename).relative_to(ROOT)}:{last.lineno}"


def fuzz(target: str, seconds: int, folder: Path) -> None:
    """Tries inputs in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["archlab", "yaml"]):
        check = TARGETS[target](folder)
    found, corpus, start = (BUILD / target / name for name in ("found", "corpus", "seeds"))
    for each in (found, corpus, start):
        each.mkdir(parents=True, exist_ok=True)
    for data in seeds(target):
        (start / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    hexed = ("".join(f"\\x{byte:02x}" for byte in word) for word in words(target))
    (folder / "words").write_text("".join(f'"{word}"\n' for word in hexed))
    told: set[str] = set()

    def one(data: bytes) -> None:
        try:
            with bounded_cpu():
                check(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            if (line := failing_line(error)) not in told:
                told.add(line)
                (found / re.sub(r"\W+", "-", line)).write_bytes(data)
                print(f"FOUND {line}\n{data!r}\n{''.join(traceback.format_exception(error))}", flush=True)

    held_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    options = {
        "max_total_time": seconds,
        "max_len": _MOST_SEED if target == "studies" else _MOST_YAML,
        "timeout": 60,
        "rss_limit_mb": held_mb + MEMORY_MB,
        "malloc_limit_mb": MEMORY_MB,
        "dict": folder / "words",
        "artifact_prefix": f"{found}/",
        "print_final_stats": 1,
    }
    atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(corpus), str(start)], one)
    atheris.Fuzz()


def fuzz_for(target: str, minutes: float) -> int:
    """Tries inputs for so long, in another process if one was ended. Returns how many were found that break the
    promise."""
    end, tried = time.monotonic() + minutes * 60, 0
    while (left := int(end - time.monotonic())) > 5:
        command = [sys.executable, "-m", "tests.fuzz.coverage", target, "--seconds", str(left)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            last = ""
            for line in process.stderr:
                last = line if re.match(r"#\d", line) else last
                if not line.startswith(("#", "\t", "INFO: Instr", "WARNING: Failed to find")):
                    print(line, end="", flush=True)
        counted = re.match(r"#(\d+)", last)
        tried += int(counted[1]) if counted else 0
        print(f"{target}: {tried:,} inputs; {last.strip()}", flush=True)
        if counted is None:
            print("the process tried nothing: is atheris installed?")
            return 1
    found = sorted((BUILD / target / "found").iterdir())
    print(f"{target}: {tried:,} inputs in {minutes:g} minutes, {len(found)} of them found to break the promise")
    return len(found)


def lines_of(check: Check, inputs: Iterable[bytes]) -> Iterator[tuple[bytes, set[tuple[str, int]]]]:
    """Each input, and the lines of ours that it reaches."""
    for data in inputs:
        reached: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, _: Any, reached: set[tuple[str, int]] = reached) -> Any:
            code = frame.f_code
            if event == "call" and (str(ROOT) not in code.co_filename or "/tests/" in code.co_filename):
                return None
            reached.add((code.co_filename, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            check(data)
        finally:
            sys.settrace(None)
        yield data, reached


def pick(target: str, folder: Path) -> None:
    """Writes the shortest inputs that reach lines which no seed reaches, one to a line as Python writes bytes."""
    check, known = TARGETS[target](folder), set[tuple[str, int]]()
    for _, reached in lines_of(check, seeds(target)):
        known |= reached
    inputs = {file.read_bytes() for file in (BUILD / target / "corpus").iterdir()} | set(read_corpus(target))
    kept: list[bytes] = []
    for data, reached in lines_of(check, sorted(inputs, key=lambda each: (len(each), each))):
        if reached - known and sum(map(len, kept)) + len(data) <= _MOST_PICKED:
            known |= reached
            kept.append(data)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{data!r}\n" for data in kept))
    print(f"{target}: {len(kept)} of {len(inputs)} inputs reach lines that no seed does, {sum(map(len, kept)):,} bytes")


def read_corpus(target: str) -> list[bytes]:
    """What `pick` has written."""
    file = CORPUS / f"{target}.txt"
    return [ast.literal_eval(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=60, help="how long inputs are tried")
    parser.add_argument("--pick", action="store_true", help="write the corpus that a test tries again")
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)  # of the process that tries them
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        if given.pick:
            pick(given.target, Path(folder))
            return 0
        if given.seconds:
            fuzz(given.target, given.seconds, Path(folder))
    return min(fuzz_for(given.target, given.minutes), 1)


if __name__ == "__main__":
    sys.exit(main())

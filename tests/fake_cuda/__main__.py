"""`python -m tests.fake_cuda GUARD`: reads trials as lines of JSON, and answers each with a line."""

import json
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fake_cuda.card import pretend


def main(guard: Path) -> None:
    pretend(guard)
    from tests.fake_cuda.steps import Card

    with tempfile.TemporaryDirectory() as folder:
        card = Card(Path(folder))
        for line in sys.stdin:
            try:
                asked = json.loads(line)
                answer = getattr(card, asked.pop("do"))(**asked)
            except Exception as error:  # whatever it is, the test that asked shows it
                answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Without a CUDA device Triton's kernels run in its interpreter, which must be said before Triton is imported.

One torch thread, as each trial has: small models are no faster on more, and two test processes do not fight.
"""

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.slow_tests import FIRST, is_left_to_all, listed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Loggers(dict[str, Any]):
    """All loggers, which may be walked through while a thread of an earlier test imports something and adds its own:
    pytest does so before and after each test, and fails where their number changes meanwhile."""

    def values(self) -> Any:
        """Those that there are now."""
        return list(super().values())


logging.root.manager.loggerDict = Loggers(logging.root.manager.loggerDict)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow.txt as slow, leaves out what `make test-all` alone tries, and begins with the files that
    take longest."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(FIRST)))
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if config.option.markexpr == "slow":
        left = {item for item in items if item.get_closest_marker("slow") and is_left_to_all(item.nodeid)}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Computes on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""Whether this machine has the compiler that torch.compile and Triton need."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path


@cache
def cannot_compile() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    wanted = f"{compiler()} (or a C++ compiler that CXX names)"
    missing = [what for what, found in ((wanted, shutil.which(compiler())), (header, header.exists())) if not found]
    return f"{' and '.join(map(str, missing))} not found" if missing else None


def compiler() -> str:
    """The C++ compiler that torch.compile takes."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")

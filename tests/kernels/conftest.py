"""Puts this folder's table of calls on the path: tests are imported without packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Moves the clock of Python programs by LAB_AHEAD_S seconds: Python imports a module of this name before all else."""

import os
import time

AHEAD_S = float(os.environ["LAB_AHEAD_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + AHEAD_S
time.time_ns = lambda: _time_ns() + round(AHEAD_S * 1e9)

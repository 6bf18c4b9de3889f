"""From planned trials to results: the driver, its ends, its watchers, the garbage.

Its door: `run`; `measure`, `smoke`, `garbage`, `stop_and_retry`; to look on `progress`, `status`, `watch`, `ending`.
"""

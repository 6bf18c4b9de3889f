"""From planned trials to results: the driver, its ends, its watchers, the garbage."""

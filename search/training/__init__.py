"""One trial, from `trial.json` to `result.json`. `train.train` is what an executor calls."""

"""One trial, from `trial.json` to `result.json`. `train.train` is what an executor calls, by its name.

Its door: `module` and `loop` for who has weights in hand, `held_out`, `step_times`, `compiling`, `shared_beginnings`,
`parallel.rules`.
"""

"""Where trials are also written down, for other tools to read: MLflow and Optuna. Neither is the truth.

Its door: `shipper`, `shipper_process`, `database`.
"""

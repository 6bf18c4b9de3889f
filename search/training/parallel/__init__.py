"""Several processes that train one trial (`resources: {parallel: …}`): what is refused, and how the work is divided.

Nothing here is imported by a trial that one process trains. What was chosen, and why: docs/decisions/0008.
"""

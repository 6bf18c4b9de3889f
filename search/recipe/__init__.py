"""How a variant is trained, as a spec: stages, optimizer, schedule, initial weights."""

"""A whole model as a spec: its stacks, the rules that it must keep, what its layers share."""

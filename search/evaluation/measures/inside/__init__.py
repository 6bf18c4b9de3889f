"""Measures that look inside of a model: attention, activations, gates, routers, gradients."""

"""Gradient statistics: sketches of gradients, taken while a model trains."""

"""Methods: a plan applied to a real module with PyTorch's own wrappers."""

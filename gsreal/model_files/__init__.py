"""Model files: tracing a module under fake tensors, and building it back from the file."""

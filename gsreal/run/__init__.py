"""A real run: launching ranks, training, measuring, checkpoints."""

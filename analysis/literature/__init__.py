"""Predictions of training runs that others have measured and published, and how far they are off."""

"""Executes the same scenarios with torch.distributed, and measures them."""

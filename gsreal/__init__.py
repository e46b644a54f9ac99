"""Executes scenarios with torch.distributed on real ranks, and measures them."""

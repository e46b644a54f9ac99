"""Tables of sweeps: reading them, and grouping their points into plans by setting."""

"""Studies of thresholds: paired trainings of variants, and their effect on quality, bytes and time."""

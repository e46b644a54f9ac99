"""Micro-benchmarks of one machine, for `gsreal calibrate`.

Nothing here trains a scenario: single operations, one layer after another, one collective after another. Ranks that are
not measured wait in a barrier, so that "alone" is alone and "together" is every rank at once.
"""

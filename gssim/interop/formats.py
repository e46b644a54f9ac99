"""Names of the formats that are read and written, in a module of their own so that help texts load no importers."""

FORMATS = ("deepspeed", "accelerate", "megatron", "torchtitan", "automodel", "axolotl", "trainer")
PROGRAMS = ("deepspeed", "accelerate", "torchtitan", "torchrun")
"""Formats that `gssim export` writes."""

"""Names of the formats that are read and written; apart, so that help texts need none of the importers."""

FORMATS = ("deepspeed", "accelerate", "megatron", "torchtitan", "automodel", "axolotl")
PROGRAMS = ("deepspeed", "accelerate", "torchtitan", "torchrun")
"""What `gssim export` writes."""

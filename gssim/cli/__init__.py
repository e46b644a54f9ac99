"""The `gssim` command line."""

from gssim.cli import interop_commands as _interop_commands  # importing it adds its commands to the application
from gssim.cli.commands import app, main

__all__ = ["app", "main"]

del _interop_commands

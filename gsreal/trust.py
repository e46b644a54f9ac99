"""Code that a file may name, and who allows it to run.

Scenario, sweep and model files hold data, but a model file names the factory of its module, and `gsreal` calls that.
Factories of `gsreal.models` and modules of `transformers.models` are trusted: what they do with plain data is to make
a module. Any other code runs only where the command line has said so (--trust-code), or has named it itself.
"""

import importlib
import os
from typing import Any

from gssim.units import UserError
from gssim.workload import Module

VARIABLE = "GSREAL_TRUST_CODE"
"""Environment variable in which ranks find what the command line said; every command sets or removes it."""
OURS = "gsreal.models"
TRANSFORMERS = "transformers.models"


def set_trust(trusted: bool) -> None:
    """Allow, or no longer, any code that files name to run in this process and in those that it starts."""
    if trusted:
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)


def check_factory(module: Module, *, where: str) -> None:
    """Raise UserError where a model file names code that is not trusted; nothing is imported for that."""
    if module.factory is None or os.environ.get(VARIABLE) == "1":
        return
    inside, _, name = _parts(module.factory)
    ours = inside == OURS and not name.startswith("_")
    if not (ours or f"{inside}.".startswith(f"{TRANSFORMERS}.")):
        raise _refusal(module.factory, where)


def imported_factory(module: Module, *, where: str) -> Any:
    """Return what a module's factory names, if that may run here; raise UserError otherwise."""
    check_factory(module, where=where)
    assert module.factory is not None
    inside, _, name = _parts(module.factory)
    try:
        found = getattr(importlib.import_module(inside), name)
    except Exception as error:  # importing runs the user's code
        from gsreal.hugging_face import first_line

        raise UserError(
            f"{where}: module.factory = '{module.factory}': cannot be imported: {first_line(error)}"
        ) from error
    if os.environ.get(VARIABLE) != "1" and not _makes_modules(found, inside):
        raise _refusal(module.factory, where)
    return found


def _makes_modules(found: Any, inside: str) -> bool:
    """Return whether a name of a trusted module is a factory defined there, not what that module has imported."""
    from torch import nn

    defined = str(getattr(found, "__module__", ""))
    if inside == OURS:
        return callable(found) and defined == OURS
    return isinstance(found, type) and issubclass(found, nn.Module) and f"{defined}.".startswith(f"{TRANSFORMERS}.")


def _parts(path: str) -> tuple[str, str, str]:
    """Return (module, separator, name) of the dotted path `package.module.name` (or `package.module:name`)."""
    return path.replace(":", ".").rpartition(".")


def _refusal(path: str, where: str) -> UserError:
    return UserError(
        f"{where}: module.factory = '{path}': neither a factory of {OURS} nor a module of {TRANSFORMERS}; if you trust "
        "its code, give --trust-code"
    )

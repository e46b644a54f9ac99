"""The examples in docstrings are true."""

import doctest
import importlib
import importlib.util
import linecache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WITH_TORCH = ("gsreal",)


def modules_with_examples() -> list[str]:
    """Return the modules whose docstrings have examples."""
    files = (file for package in ("gssim", "gsreal", "analysis") for file in sorted((ROOT / package).rglob("*.py")))
    written = [file.relative_to(ROOT) for file in files if ">>>" in file.read_text(encoding="utf-8")]
    return [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in written]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_give_what_they_say(name: str) -> None:
    if name.startswith(WITH_TORCH) and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install 'gssim[real]'")
    linecache.clearcache()  # each module's examples begin with a look at every file that is in it: thousands
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert not found.failed

"""The model files that come with the package, by name: scenarios may name them instead of a path."""

from functools import cache
from importlib.resources import files
from pathlib import Path


@cache
def shipped_models() -> dict[str, Path]:
    """Return the shipped model files by name.

    The package has a link to `scenarios/models` of the repository, where they lie; a wheel holds copies.

    >>> shipped_models()["gpt2-124m"].name
    'gpt2-124m.toml'
    """
    folder = Path(str(files("gssim.workload").joinpath("models")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}

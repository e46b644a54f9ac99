"""Warnings for Results that were made by other versions of gssim, gsreal or torch."""

from collections import Counter
from collections.abc import Sequence

from analysis.compare.comparison import Pair
from analysis.compare.table import ResultFile, name_of
from gssim.execution import SHOWN, code_digest, package_digest

MOST_NAMES = 3


def differences(pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence for each difference between the code of some Results and the installed code.

    No Result is left out for it: a changed line need not change a figure.
    """
    predicted = [pair.predicted for pair in pairs]
    measured = [file for pair in pairs for file in pair.repeats]
    sentences = [
        *_of_other_code(predicted, "code", code_digest(), "predicted", "another gssim", "predict again"),
        *_of_other_code(
            measured, "gsreal", package_digest("gsreal"), "measured", "another gsreal", "--again measures anew"
        ),
    ]
    versions = Counter(str(file.result.provenance.get("torch", "not stated")) for file in measured)
    if len(versions) > 1:
        counts = ", ".join(f"{version} ({count})" for version, count in versions.most_common())
        sentences.append(f"measured with several versions of torch: {counts}")
    return sentences


def _of_other_code(files: Sequence[ResultFile], key: str, digest: str, done: str, other: str, advice: str) -> list[str]:
    """Return a sentence on the files whose code digest differs or is missing; nothing where there are none."""
    names = [name_of(file.result) for file in files if file.result.provenance.get(key) != digest[:SHOWN]]
    if not names:
        return []
    shown = list(dict.fromkeys(names))
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    listed = f"{', '.join(shown[:MOST_NAMES])}{more}"
    return [f"{len(names)} of {len(files)} {done} with {other} than this one, or one not stated ({listed}); {advice}"]

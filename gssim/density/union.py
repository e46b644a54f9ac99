"""How many elements at least one of several ranks sends."""

import math
from typing import Any

import numpy as np


def united(sent: float, *, ranks: int, mean_to_rms: float, correlation: float) -> float:
    """Return the fraction of elements that at least one of `ranks` ranks sends, where each sends the fraction `sent`.

    The gradients of an element are normal, with a scale that the ranks share and that is log-normally distributed over
    the elements, as wide as the ratio of mean to rms of |g| tells; of two ranks they have the given `correlation`, by a
    part that is the same for all.

        p(s, c) = P(|sqrt(r) c + sqrt(1-r) z| >= t / s);  sent = E[p];  united = E[1 - (1 - p)^ranks]

    over s log-normal, c and z normal. Source: E[|g|] / rms = sqrt(2/pi) exp(-S^2 / 2), S the deviation of ln s.

    >>> round(united(0.1, ranks=2, mean_to_rms=math.sqrt(2 / math.pi), correlation=0.0), 4)  # one scale, no common part
    0.19
    >>> united(0.1, ranks=1, mean_to_rms=0.5, correlation=0.3)
    0.1
    """
    from scipy.special import ndtr  # here, for only unions need it

    if ranks == 1 or sent <= 0 or sent >= 1:
        return sent
    spread = math.sqrt(max(0.0, 2 * math.log(math.sqrt(2 / math.pi) / mean_to_rms)))
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    weights = weights / weights.sum()
    inverse = np.exp(-spread * nodes)[:, None]
    common, own = math.sqrt(correlation) * nodes, math.sqrt(max(1e-6, 1 - correlation))

    def reached(log_threshold: float) -> Any:
        level = math.exp(log_threshold) * inverse
        return 1 - (ndtr((level - common) / own) - ndtr((-level - common) / own))

    def mean(values: Any) -> float:
        return float(weights @ values @ weights)

    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(reached(middle)) > sent else (low, middle)
    return min(1.0, max(sent, mean(1 - (1 - reached(low)) ** ranks)))

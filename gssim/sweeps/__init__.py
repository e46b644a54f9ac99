"""Predicts the points of a sweep, in parallel and resumably, as Results or as a table."""

from gssim.sweeps.inputs import Fingerprints, Unpacked, packed
from gssim.sweeps.predictions import (
    PredictionKey,
    answers,
    by_likeness,
    predict,
    predicted,
    prediction_name,
    predictions_in,
)
from gssim.sweeps.table import (
    POINT_COLUMNS,
    RESULT_COLUMNS,
    TABLES,
    check_table_place,
    columns_of,
    csv_of,
    files_of,
    kind_of,
    outcome,
    points_in,
    table_of,
    without_outcome,
    write_table,
)
from gssim.sweeps.tabulation import parts_folder, tabulate

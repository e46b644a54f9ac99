"""Identities of scenarios: every committed measurement joins its prediction, and no new key changes an id."""

import csv
import json
import os
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from strategies import scenario_of, star

from analysis.compare.table import find_results
from analysis.reference_page import tables_of
from gssim.cluster import Cluster
from gssim.execution.cache import Shared
from gssim.execution.files import write_text
from gssim.scenario import Scenario
from gssim.scenario.identity import VERSION, _digest, _fields, canonical
from gssim.scenario.sweep import load_sweep, points_of
from gssim.units import Count, spec, validated
from gssim.workload import Buffer, Model
from gssim.workload.gradient_statistics import GradientStatistics

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "scenarios"
DEFAULTS = Path(__file__).with_name("identity") / "defaults.json"


# Committed measurements ----------------------------------------------------------------------------------------------


@cache
def stored():
    """Return all committed Results, those in archives too."""
    return find_results([SCENARIOS / "measured"]).files


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_every_stored_result_is_named_by_the_id_of_its_scenario(part):
    """Every fourth of them, from one of the first four on."""
    assert len(stored()) == 427
    shared, models = Shared(), {}
    for file in stored()[part::4]:
        data = file.result.scenario
        text = json.dumps(data["workload"]["model"])
        if text not in models:  # few different ones, which take the time
            models[text] = validated(Model, data["workload"]["model"], file=str(file.path))
        workload = data["workload"] | {"model": models[text]}
        scenario = validated(Scenario, data | {"workload": workload}, file=str(file.path))
        assert scenario.identity(shared) == file.result.scenario_id, file.path
        assert file.path.name.startswith(f"{scenario.name}.{file.result.scenario_id}.measured"), file.path


def test_results_that_differ_in_more_than_repeats_and_rates_have_ids_of_their_own():
    assert len({file.result.scenario_id for file in stored()}) == 295
    assert len({file.result.calibration_id for file in stored()}) == 59


def test_the_labs_points_ask_what_was_measured():
    path = SCENARIOS / "sweeps" / "lab.toml"
    shared = Shared()
    points = {point.name: point.load(shared=shared) for point in points_of(load_sweep(path), file=path, overrides=[])}
    packed = [file.result for file in stored() if "lab" in file.path.parts]
    compared = rows_of("lab/comparison.csv")
    measured = {(result.scenario["name"], result.scenario_id) for result in packed}
    measured |= {(row["name"], row["scenario_id"]) for row in (*compared, *rows_of("lab/gs_against_dense.csv"))}
    assert len(measured) == len(compared) == len(points) == 86
    for name, scenario_id in measured:
        assert points[name].scenario.identity(shared) == scenario_id, name
    for row in compared:  # predicted from the calibrations that ship
        assert points[row["name"]].calibration(shared) == row["calibration_id_predicted"], row["name"]


def test_the_demos_rows_ask_what_was_measured():
    path = SCENARIOS / "sweeps" / "demo-full.toml"
    points = {point.name.partition("--")[2]: point for point in points_of(load_sweep(path), file=path)}
    rows = rows_of("two-cores/comparison.csv")
    assert {row["name"] for row in rows} == set(points)
    for row in rows:
        scenario = points[row["name"]].load(gradients_needed=False).scenario
        assert scenario.scenario_id == row["scenario_id"], row["name"]


def rows_of(name):
    with (SCENARIOS / "measured" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Keys that are added later -------------------------------------------------------------------------------------------


@spec
class Before:
    """A table as it was read at first."""

    steps: Count = 3
    options: tuple[Count, ...] = ()


@spec
class After:
    """The same with a key more."""

    steps: Count = 3
    options: tuple[Count, ...] = ()
    seed: Count = 0


def test_a_new_key_changes_an_id_only_where_it_is_used():
    assert _digest(_fields(Before(steps=5))) == _digest(_fields(After(steps=5)))
    assert _digest(_fields(After(steps=5, seed=1))) != _digest(_fields(After(steps=5)))
    assert _fields(After(steps=3, options=())) == {}


def test_which_buffers_hold_integers_and_which_operands_are_copied_changes_no_id():
    """They follow from the module: files that were traced before these were noted ask the same."""
    model = scenario_of(star(2), {"method": "ddp"}).workload.model
    copied = Buffer.parse("f0 f0 operand-casts 8*b*s")
    layers = [replace(each, buffers=(copied, *(replace(b, fixed=True) for b in each.buffers))) for each in model.layers]
    noted = replace(model, layers=tuple(layers))
    assert noted != model
    assert any(layer.buffers for layer in layers)
    ids = {scenario_of(star(2), {"method": "ddp"}, model=each).scenario_id for each in (model, noted)}
    assert len(ids) == 1


def test_canonical_data_are_json_without_loss():
    shares = {"batch": (0.625, 0.375), "shards": (0.7, 0.3)}
    data = canonical(scenario_of(star(2), {"method": "gs", "shares": shares})._parts(), Shared())
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    assert json.dumps(json.loads(text), sort_keys=True) == text
    assert data["version"] == VERSION


def defaults():
    """Return the defaults of all tables that identities are made of."""
    tables = {table for root in (Scenario, Cluster, Model, GradientStatistics) for table in (root, *tables_of(root))}
    by_table = {
        table.__name__: {
            field.name: TypeAdapter(type(value)).dump_python(value, mode="json")
            for field in fields(table)
            if (value := default_of(field)) is not MISSING and not is_dataclass(value)
        }
        for table in tables
    }
    return {name: keys for name, keys in by_table.items() if keys}


def default_of(field):
    default = getattr(field.default, "default", field.default)  # of a pydantic field, with its checks
    factory = field.default_factory
    return factory() if default is MISSING and factory is not MISSING else default


def test_no_default_has_changed():
    """Absent keys are not part of an id: if a default changed, equal ids would denote other scenarios."""
    now = json.loads(json.dumps(defaults()))
    if os.environ.get("GSSIM_UPDATE_GOLDEN"):
        write_text(DEFAULTS, json.dumps(now, indent=1, sort_keys=True) + "\n")
    kept = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    changed = {
        f"{table}.{key}": (value, now[table][key])
        for table, keys in kept.items()
        for key, value in keys.items()
        if key in now.get(table, {}) and now[table][key] != value
    }
    assert changed == {}, "raise VERSION in gssim/scenario/identity.py, and migrate what is committed"
    assert now == kept, "new keys change no id: rewrite with GSSIM_UPDATE_GOLDEN=1"


def test_all_tables_are_looked_at():
    assert {"Plan", "Push", "Publish", "Run", "Workload", "TokenInput", "DeviceType", "Ring"} <= set(defaults())


SAID_ANYWAY = ({"dp_shard": 2}, {"gradients": "push"}, {"exchange": "point-to-point"}, {"ranks": 2})


@pytest.mark.parametrize("plan", SAID_ANYWAY, ids=str)
def test_what_a_method_does_anyway_may_be_said(plan):
    usual = scenario_of(star(2), {"method": "gs"})
    assert scenario_of(star(2), {"method": "gs", **plan}).scenario_id == usual.scenario_id

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import (
    PAIR_TOML,
    SCENARIO_TOML,
    cluster_of,
    device_type,
    exponential_statistics,
    loaded_of,
    scenario_of,
    star,
    write_files,
)

from gssim import load, simulate
from gssim.cluster import Curve, LayerProfile
from gssim.cluster.measured import Profile
from gssim.errors import UserError
from gssim.scenario import layer_profile, load_scenario, read_toml, single_device, value_bytes
from gssim.scenario.layer_costs import sample_cost_s
from gssim.scenario.overrides import parsed_override

SCENARIOS = Path(__file__).parents[2] / "scenarios"
UNEQUAL = {"types": {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 2.5e8})}}


def test_a_scenario_is_loaded_with_the_files_that_it_names(tmp_path):
    loaded = load_scenario(write_files(tmp_path))
    scenario = loaded.scenario
    assert scenario.name == "scenario"
    assert scenario.question == "On two equal hosts, does anything beat all-reduce?"
    assert (scenario.cluster.name, scenario.workload.model.name) == ("pair", "tiny")
    assert (scenario.ranks, scenario.batch_sizes, scenario.shard_shares) == (2, (4, 4), (0.5, 0.5))
    assert loaded.gradients is None


def test_files_are_parsed_once_in_a_process_and_again_when_their_text_changes(tmp_path):
    path = write_files(tmp_path)
    first = load_scenario(path).scenario
    assert load_scenario(path).scenario.workload.model is first.workload.model
    model = tmp_path / "tiny.toml"
    before, modified = model.read_text(), model.stat()
    assert 'name = "tiny"' in before
    model.write_text(before.replace('name = "tiny"', 'name = "tony"'))
    os.utime(model, ns=(modified.st_atime_ns, modified.st_mtime_ns))  # of the same size and time
    assert load_scenario(path).scenario.workload.model.name == "tony"
    read_toml(model)[1]["name"] = "changed by a caller"
    assert read_toml(model)[1]["name"] == "tony"


def test_statistics_are_read_only_where_a_threshold_needs_them(tmp_path):
    path = write_files(tmp_path)
    pushed = ["plan.method=gs", "plan.push.threshold=1e-3"]
    assert load_scenario(path, pushed).gradients == exponential_statistics()
    assert load_scenario(path, pushed, gradients_needed=False).gradients is None
    (tmp_path / "tiny.json").unlink()
    assert load_scenario(path, ["plan.method=gs", "plan.push.threshold=0"]).statistics_needed is False
    with pytest.raises(UserError, match=r"workload.gradients = 'tiny.json': no such file"):
        load_scenario(path, pushed)


def test_tables_may_be_given_inline(tmp_path):
    cluster = re.sub(r"^\[(\[?)", r"[\1cluster.", PAIR_TOML, flags=re.M)
    text = SCENARIO_TOML.replace('cluster = "pair.toml"', "") + "\n[cluster]\n" + cluster
    inline = load_scenario(write_files(tmp_path, scenario=text))
    assert inline.scenario.cluster == load_scenario(write_files(tmp_path)).scenario.cluster


def test_overrides_change_numbers_words_and_tables(tmp_path):
    path = write_files(tmp_path)
    overrides = ["plan.method=gs", "plan.shares.shards=[0.75, 0.25]", "run.steps=7", 'workload.optimizer="sgd"']
    scenario = load_scenario(path, overrides).scenario
    assert (scenario.plan.method, scenario.shard_shares) == ("gs", (0.75, 0.25))
    assert (scenario.run.steps, scenario.workload.optimizer) == (7, "sgd")


@pytest.mark.parametrize(
    "text", ['"a b#c"', '""', '"it\'s"', r'"\u00e9 \\ \""', '"é"', '"~!"', "'literal'", ' "x" ', '"tab\t"']
)
def test_a_text_in_an_override_is_what_toml_says(text):
    assert parsed_override(f"name={text}") == ("name", tomllib.loads(f"name = {text}")["name"])


def test_a_file_named_by_an_override_is_looked_up_from_where_the_user_stands(tmp_path, monkeypatch):
    path = write_files(tmp_path / "scenarios")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "other.toml").write_text(PAIR_TOML.replace('name = "pair"', 'name = "other"'))
    monkeypatch.chdir(tmp_path / "here")
    assert load_scenario(path, ["cluster=other.toml"]).scenario.cluster.name == "other"
    assert load_scenario(path, ["cluster=pair.toml"]).scenario.cluster.name == "pair"


# Shares --------------------------------------------------------------------------------------------------------------


def test_an_override_names_the_calibration_of_a_clusters_devices(tmp_path, monkeypatch):
    shipped = SCENARIOS / "devices/lab-cores.toml"
    text = shipped.read_text().replace(
        '["lab-core-0.8".peak_flop_per_s]\n', '["lab-core-0.8".peak_flop_per_s]\nfp16 = 1e9\n'
    )
    assert text != shipped.read_text()
    (tmp_path / "today.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    changes = [f"cluster={SCENARIOS}/clusters/lab-2-hosts.toml", "cluster.device_types=today.toml"]
    before, now = (load_scenario(SCENARIOS / "demo.toml", changes[:count]) for count in (1, 2))
    assert now.scenario.cluster.type_of(0).peak_flop_per_s["fp16"] == 1e9
    assert "fp16" not in before.scenario.cluster.type_of(0).peak_flop_per_s
    assert now.scenario.scenario_id == before.scenario.scenario_id
    assert now.calibration_id != before.calibration_id
    with pytest.raises(UserError, match=re.escape("cluster.device_types = 'yesterday.toml': no such file")):
        load_scenario(SCENARIOS / "demo.toml", [changes[0], "cluster.device_types=yesterday.toml"])


def test_a_batch_by_throughput_follows_the_devices_rates():
    cluster = star(2, type_names=["fast", "slow"], **UNEQUAL)
    scenario = scenario_of(cluster, {"method": "gs", "shares": {"batch": "throughput"}}, global_batch_size=10)
    assert scenario.batch_sizes == (8, 2)


def test_shards_by_compute_follow_the_devices_rates():
    slow, fast = (device_type(peak_flop_per_s={"fp32": rate}, memory_bandwidth_bytes_per_s=rate) for rate in (1e9, 4e9))
    cluster = star(2, type_names=["slow", "fast"], types={"slow": slow, "fast": fast})
    scenario = scenario_of(cluster, {"method": "gs", "shares": {"shards": "compute"}})
    assert scenario.shard_shares == pytest.approx((0.2, 0.8))


def test_samples_by_throughput_follow_the_memory_bandwidth_where_it_bounds_the_layers():
    """Devices of equal FLOP/s got equal samples, however slow the memory of one was."""
    shares = {"batch": "throughput", "shards": "compute"}
    found = [
        scenario_of(star(2, type_names=["slow", "fast"], types=types), {"method": "gs", "shares": shares})
        for types in (
            {name: device_type(memory_bandwidth_bytes_per_s=rate) for name, rate in (("slow", 1e4), ("fast", 3e4))},
            {name: device_type(memory_bandwidth_bytes_per_s=rate) for name, rate in (("slow", 1e15), ("fast", 3e15))},
        )
    ]
    assert [scenario.batch_sizes for scenario in found] == [(2, 6), (4, 4)]
    assert found[0].shard_shares == pytest.approx((0.25, 0.75), rel=1e-2)


def test_samples_by_throughput_are_faster_than_even_ones_on_unequal_gpus():
    even, by_throughput = (
        simulate(
            load(SCENARIOS / "gpt2-unequal-gpus.toml", {"plan.method": "ddp", "plan.shares.batch": rule})
        ).step_time_s
        for rule in ("even", "throughput")
    )
    assert by_throughput < 0.95 * even


def profile(seconds: float, **changes) -> Profile:
    curve = Curve(sizes=(1, 4), values=(seconds, 4 * seconds))
    layers = {name: LayerProfile(forward_s=curve, backward_s=curve) for name in ("embedding", "h", "head", "loss")}
    return Profile(**({"model": "tiny", "precision": "fp32", "sequence_length": 4, "layers": layers} | changes))


def test_shares_by_throughput_name_the_devices_whose_rate_is_not_known():
    with pytest.raises(UserError, match=r"device_types\.fast: no peak_flop_per_s\.fp16 .*plan\.ranks"):
        _ = replace(
            scenario_of(star(2), {"method": "ddp", "shares": {"batch": "throughput"}}),
            workload=replace(scenario_of(star(2), {"method": "ddp"}).workload, precision="fp16"),
        ).data_batch_sizes


def test_throughput_is_measured_where_there_is_a_profile():
    scenario = scenario_of(star(1), {"method": "single"})
    device = replace(scenario.cluster.type_of(0), profiles=(profile(1e-3),))
    assert sample_cost_s(device, scenario.workload, 1, name="fast") == pytest.approx(2 * 5 * 1e-3)


def test_layers_that_a_profile_lacks_count_at_the_rates():
    """Before, such layers took no time: a device with one measured layer got most of the batch."""
    workload = scenario_of(star(1), {"method": "single"}).workload
    device = scenario_of(star(1), {"method": "single"}).cluster.type_of(0)
    layers = profile(1e-3).layers
    measured = replace(device, profiles=(profile(1e-3, layers={"head": layers["head"]}),))
    rest = replace(
        workload, model=replace(workload.model, layers=workload.model.layers[:2] + workload.model.layers[3:])
    )
    expected_s = sample_cost_s(device, rest, 8, name="fast") + 2e-3
    assert sample_cost_s(measured, workload, 8, name="fast") == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "plan", ["method='ddp', shares={batch='throughput'}, micro_batches=2", "method='pipeline', micro_batches=4"]
)
def test_a_division_of_work_by_unknown_rates_names_the_file_and_the_devices(plan, tmp_path):
    file = write_files(tmp_path)
    with pytest.raises(UserError, match=rf"^{file}: cluster: device_types\.fast: no peak_flop_per_s\.fp16"):
        load_scenario(file, [f"plan={{{plan}}}", "workload.precision=fp16"])


def test_a_profile_of_memory_alone_leaves_the_division_of_work_to_the_rates():
    """Times of zero would divide by zero, or give one of two equal devices more samples."""
    named = {"profiles": (profile(0.0),)}
    cluster = star(2, types={"cpu": device_type(**named)})
    shares = {"shards": "compute", "batch": "throughput"}
    scenario = scenario_of(cluster, {"method": "gs", "shares": shares}, global_batch_size=12)
    assert scenario.batch_sizes == (6, 6)
    assert scenario.shard_shares == (0.5, 0.5)


def test_a_profile_of_another_model_precision_or_sequence_does_not_count():
    workload = scenario_of(star(1), {"method": "single"}).workload
    device = scenario_of(star(1), {"method": "single"}).cluster.type_of(0)
    layer = workload.model.layers[1]
    for other in ({"model": "huge"}, {"precision": "fp64"}, {"sequence_length": 8}, {"layers": {}}):
        assert layer_profile(replace(device, profiles=(profile(1e-3, **other),)), workload, layer) is None
    anywhere = profile(1e-3, sequence_length=None)
    assert layer_profile(replace(device, profiles=(anywhere,)), workload, layer) == anywhere.layers["h"]


def test_one_device_is_the_reference_of_every_method():
    scenario = scenario_of(star(2), {"method": "gs", "push": {"threshold": 0.0}})
    reference = single_device(scenario)
    assert (reference.ranks, reference.batch_sizes, reference.plan.push.threshold) == (1, (8,), None)
    assert [value_bytes(replace(scenario.workload, precision=p)) for p in ("fp32", "fp64")] == [4, 8]


# Identity ------------------------------------------------------------------------------------------------------------

BASE = scenario_of(star(2), {"method": "gs"})


def same(**changes):
    return replace(BASE, **changes).scenario_id == BASE.scenario_id


def faster(cluster):
    links = tuple(replace(link, bandwidth_bytes_per_s=9e9, latency_s=1.0, source="else") for link in cluster.links)
    kind = replace(
        cluster.device_types["fast"],
        peak_flop_per_s={"fp32": 7e13},
        memory_bytes=9e9,
        profiles=(profile(5.0),),
        price_usd_per_h=3.0,
    )
    return replace(cluster, links=links, device_types={"fast": kind})


def renamed(cluster):
    return replace(
        cluster,
        name="other",
        source="elsewhere",
        device_types={"quick": cluster.device_types["fast"]},
        devices=tuple(replace(d, name="x" + d.name, host="x" + d.host, type="quick") for d in cluster.devices),
        switches=("xsw",),
        links=tuple(replace(link, between=tuple("x" + end for end in link.between)) for link in cluster.links),
    )


def test_the_identity_ignores_rates_profiles_prices_names_and_paths():
    assert same(cluster=faster(BASE.cluster))
    assert same(cluster=renamed(BASE.cluster))
    assert same(name="other", question="why?")
    model = replace(BASE.workload.model, name="other", source="elsewhere")
    assert same(workload=replace(BASE.workload, model=model, gradients="other.json"))


def test_the_identity_ignores_the_order_of_links_and_the_ends_of_those_that_go_both_ways():
    links = tuple(replace(link, between=link.between[::-1]) for link in reversed(BASE.cluster.links))
    assert same(cluster=replace(BASE.cluster, links=links))


def test_the_identity_ignores_how_the_same_shares_were_asked_for():
    shares = replace(BASE.plan.shares, batch=(0.5, 0.5), shards=(0.5, 0.5))
    assert same(plan=replace(BASE.plan, shares=shares))


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": {"global_batch_size": 16}},
        {"workload": {"sequence_length": 8}},
        {"workload": {"optimizer": "sgd"}},
        {"workload": {"precision": "fp64"}},
        {"workload": {"learning_rate": 0.5}},
        {"plan": {"method": "zero2"}},
        {"plan": {"overlap": False}},
        {"plan": {"bucket_bytes": 100.0}},
        {"run": {"seed": 1}},
        {"run": {"steps": 9}},
    ],
    ids=str,
)
def test_the_identity_changes_with_workload_plan_and_run(changes):
    ((part, values),) = changes.items()
    assert not same(**{part: replace(getattr(BASE, part), **values)})


def test_the_identity_changes_with_shares_and_threshold():
    assert not same(plan=replace(BASE.plan, shares=replace(BASE.plan.shares, batch=(0.25, 0.75))))
    assert not same(plan=replace(BASE.plan, shares=replace(BASE.plan.shares, shards=(0.25, 0.75))))
    assert not same(plan=replace(BASE.plan, push=replace(BASE.plan.push, threshold=1e-3)))


def test_the_identity_changes_with_the_clusters_structure():
    wired = cluster_of([("d0", "d1")], devices=2)
    one_way = cluster_of([("d0", "sw"), ("sw", "d1")], devices=2, directed=True)
    two_types = star(2, type_names=["fast", "slow"], **UNEQUAL)
    one_host = replace(BASE.cluster, devices=tuple(replace(d, host="h") for d in BASE.cluster.devices))
    gpus = star(2, types={"fast": device_type(kind="cuda")})
    other = [replace(BASE, cluster=c) for c in (wired, one_way, two_types, one_host, gpus, star(2, backend="nccl"))]
    found = {scenario.scenario_id for scenario in [BASE, *other]}
    assert len(found) == 7


def test_the_calibration_changes_with_rates_and_statistics_and_not_with_the_plan():
    pushed = replace(BASE, plan=replace(BASE.plan, push=replace(BASE.plan.push, threshold=1e-3)))
    before = loaded_of(pushed).calibration_id
    assert loaded_of(replace(pushed, cluster=faster(BASE.cluster))).calibration_id != before
    assert loaded_of(pushed, exponential_statistics(rms=2e-3)).calibration_id != before
    changed = replace(pushed, plan=replace(pushed.plan, overlap=False))
    assert loaded_of(changed).calibration_id == before


@pytest.mark.parametrize("key", ["cluster", "workload.model"])
def test_a_name_that_is_too_long_for_a_file_is_no_file(key, tmp_path):
    with pytest.raises(UserError, match="no such file") as caught:
        load_scenario(write_files(tmp_path), [f'{key}="{"é" * 300}"'])
    assert "\n" not in str(caught.value)

# ruff: noqa: E501  a fault and its message are one line
"""Presets: all there, each with a source that says how far to trust it, and what a file may do with them."""

import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from strategies import device_type

import gssim
from gssim.cluster import Cluster, DeviceType, presets
from gssim.cluster.presets import digest_of_figures, expanded, expected_errors, preset_errors
from gssim.cluster.topology import LinkType
from gssim.errors import UserError
from gssim.units import validated

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"

DEVICES = [
    "v100-sxm2-32", "v100-sxm2-16", "v100-sxm3-32", "v100-pcie-16", "p100-sxm2", "p100-pcie", "t4", "rtx2080ti",
    "titan-rtx", "a100-sxm-40", "a100-sxm-80", "a100-pcie-80", "a10", "a40", "l4", "l40s", "rtxa6000", "rtx6000ada", "rtx3090",
    "rtx4090", "h100-sxm", "h100-sxm-96", "gh200", "h100-pcie", "h200-sxm", "h20", "b200-sxm", "gb200", "mi250x-gcd",
    "mi300x", "mi325x", "tpu-v2-chip", "tpu-v3-chip", "tpu-v4-chip", "gaudi2", "gaudi3",
]  # fmt: skip
LINKS = [
    "nvlink1-p100", "nvlink2-v100", "nvlink2-v100-4", "nvlink3-a100", "nvlink4-h100", "nvlink4-gh200", "nvlink5-b200",
    "xgmi-mi300x", "pcie3x16", "pcie3x8", "pcie4x16", "pcie4x16-8-gpus", "pcie5x16", "qpi-skl", "upi-spr", "xgmi-epyc", "ib-edr-100", "ib-hdr-200", "ib-ndr-400", "efa-400x8", "roce-25",
    "roce-100",
    "tcp-1g", "tcp-10g", "tcp-25g", "tcp-25g-rtx2080ti", "tcp-50g-t4", "tcp-100g", "tcp-100g-v100", "tcp-100g-a100-40",
    "tcp-100g-a100-80", "wan-1g", "ici-v2",
]  # fmt: skip
TRUST = ("datasheet (checked)", "datasheet (recalled)", "measured", "assumed", "seed", "set by hand")


def cluster_with(**changes):
    data = {
        "name": "c",
        "backend": "nccl",
        "device_types": {"a": device_type()},
        "devices": [{"name": name, "type": "a", "host": "h"} for name in ("x", "y")],
        "links": [{"between": ["x", "y"], "preset": "pcie4x16"}],
        "source": "s",
    }
    return validated(Cluster, data | changes, file="c.toml")


def test_every_device_and_link_is_there():
    assert list(presets("devices")) == DEVICES
    assert list(presets("links")) == LINKS


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_has_all_that_a_device_type_needs(name):
    device = TypeAdapter(DeviceType).validate_python(presets("devices")[name])
    assert device.kind == ("tpu" if name.startswith(("tpu", "gaudi")) else "cuda")
    assert device.source.startswith(TRUST)
    assert 0.3 <= device.efficiency_ratio < 1
    assert (device.operation_overhead_s > 0) == (device.kind == "cuda")  # XLA issues a step as one program
    assert (device.context_bytes > 0) == (device.kind == "cuda")


@pytest.mark.parametrize("name", DEVICES)
def test_a_source_says_where_efficiency_bandwidth_and_overhead_are_from(name):
    """Data sheets tell none of them: each is measured, set to rows that others published, or assumed."""
    source = presets("devices")[name]["source"]
    assert "efficienc" in source
    assert " % of the data sheet's " in source or "all of the data sheet's memory bandwidth" in source
    assert "overhead of an operation" in source or "nothing is issued one by one" in source


@pytest.mark.parametrize("name", LINKS)
def test_a_link_has_a_rate_a_latency_and_a_source(name):
    link = TypeAdapter(LinkType).validate_python(presets("links")[name])
    assert link.source.startswith(TRUST)
    assert link.latency_s > 0


def test_only_devices_that_have_bf16_state_its_rate():
    without = {name for name, table in presets("devices").items() if "bf16" not in table["peak_flop_per_s"]}
    assert without == {name for name in DEVICES if name.startswith(("v100", "p100", "t4", "rtx2080", "titan"))}


def test_every_gpu_states_its_rate_in_fp16():
    assert all("fp16" in table["peak_flop_per_s"] for table in presets("devices").values() if table["kind"] == "cuda")


SHEETS = {
    "a40": (48, 696, 149.7, 300),
    "rtxa6000": (48, 768, 154.85, 300),
    "rtx6000ada": (48, 960, 364.25, 300),
    "h20": (96, 4000, 148, 400),
    "mi250x-gcd": (64, 1638.4, 191.5, 280),
    "mi300x": (192, 5300, 1307.4, 750),
    "mi325x": (256, 6000, 1307.4, 1000),
    "gaudi2": (96, 2450, 432, 600),
    "gaudi3": (128, 3700, 1835, 900),
}
"""Memory (GB, which are GiB but in Gaudi's), its GB/s, dense TFLOP/s in bf16 and W, by the data sheets."""


@pytest.mark.parametrize("name", SHEETS)
def test_presets_that_no_measurement_backs_are_those_of_the_data_sheets(name, tmp_path):
    """They load, a model trains on them, and what is reached of memory and its bandwidth is the documented part."""
    memory_gb, rate, tflops, power_w = SHEETS[name]
    device = TypeAdapter(DeviceType).validate_python(presets("devices")[name])
    fused = device.kind == "tpu"
    assert device.memory_bytes == pytest.approx(memory_gb * (1e9 if fused else 2**30), rel=0.08)
    assert device.memory_bytes <= memory_gb * 2**30
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(rate * 1e9 * (1 if fused else 0.69), rel=2e-3)
    assert device.peak_flop_per_s["bf16"] == pytest.approx(tflops * 1e12, rel=1e-3)
    assert device.busy_power_w == power_w
    cluster = f"""
name = "two"
backend = "nccl"
source = "test"
device_types.a = "{name}"
[topology]
kind = "switch"
devices_per_host = 2
devices = [{{device = "a", count = 2}}]
link = "pcie4x16"
"""
    (tmp_path / "two.toml").write_text(cluster)
    changes = {"cluster": str(tmp_path / "two.toml"), "workload.precision": "bf16", "plan.method": "zero2"}
    result = gssim.simulate(gssim.load(SCENARIOS / "demo.toml", changes))
    assert result.step_time_s > 0
    assert result.fits


def test_newer_is_faster():
    for names in (["p100-sxm2", "v100-sxm2-32", "a100-sxm-80", "h100-sxm", "b200-sxm"], ["tpu-v2-chip", "tpu-v3-chip"]):
        devices = [TypeAdapter(DeviceType).validate_python(presets("devices")[name]) for name in names]
        rates = [device.memory_bandwidth_bytes_per_s for device in devices]
        assert rates == sorted(rates)
    names = [f"nvlink{i}" for i in ("1-p100", "2-v100", "3-a100", "4-h100", "5-b200")]
    links = [TypeAdapter(LinkType).validate_python(presets("links")[name]) for name in names]
    assert [link.bandwidth_bytes_per_s / 1e9 for link in links] == [80, 150, 300, 450, 900]


def test_a_name_stands_for_the_whole_table():
    device = cluster_with(device_types={"a": "a100-sxm-80"}).device_types["a"]
    assert device.memory_bytes == 79.15 * 2**30
    assert device.peak_flop_per_s == {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}
    assert device.source.startswith("preset a100-sxm-80: datasheet (checked)")


@pytest.mark.parametrize(
    ("name", "measured", "kind"),
    [
        ("h100-sxm", "h100-2026-11/cluster.toml", "nvidia-h100-80gb-hbm3"),
        ("h100-sxm", "h100-large-2026-11/cluster.toml", "nvidia-h100-80gb-hbm3"),
        ("h200-sxm", "h200-2026-11/cluster.toml", "nvidia-h200"),
    ],
)
def test_memory_is_what_torch_reported_of_the_device(name, measured, kind):
    """A data sheet's 80 GB are GiB, less some: with 80e9 bytes, plans were refused that fit."""
    table = tomllib.loads((SCENARIOS / "measured" / measured).read_text(encoding="utf-8"))["device_types"][kind]
    preset = cluster_with(device_types={"a": name}).device_types["a"]
    assert preset.memory_bytes == pytest.approx(table["memory_bytes"], rel=1e-3)


def test_a_table_says_what_differs_and_why():
    table = {"preset": "a100-sxm-80", "memory_bytes": "40 GB", "source": "our own"}
    device = cluster_with(device_types={"a": table}).device_types["a"]
    assert device.memory_bytes == 40e9
    assert device.memory_bandwidth_bytes_per_s == 1407e9
    assert device.source.startswith("our own; the rest: preset a100-sxm-80: ")


def test_an_explicit_link_may_name_a_preset():
    (link,) = cluster_with().links
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (24e9, 5.7e-6)
    assert link.between == ("x", "y")


def test_keys_that_no_preset_has_need_no_source():
    table = {"preset": "h100-sxm", "step_jitter_ratio": 0.02}
    assert cluster_with(device_types={"a": table}).device_types["a"].step_jitter_ratio == 0.02


def test_expanding_leaves_the_presets_as_they_are():
    before = dict(presets("links")["pcie4x16"])
    expanded("links", {"preset": "pcie4x16", "latency_s": 1, "source": "s"})["latency_s"] = 2
    assert presets("links")["pcie4x16"] == before


REFUSED = [
    ({"device_types": {"a": "a100-smx-80"}}, "device_types.a = 'a100-smx-80': there is no preset 'a100-smx-80' of devices"),
    ({"device_types": {"a": "a100-smx-80"}}, "did you mean a100-sxm-80? allowed: v100-sxm2-32, "),
    ({"device_types": {"a": "a100"}}, "did you mean a100-sxm-40? allowed: v100-sxm2-32, "),
    ({"device_types": {"a": {"preset": "abacus"}}}, "device_types.a = {'preset': 'abacus'}: there is no preset 'abacus'"),
    ({"device_types": {"a": {"preset": 3}}}, "preset = 3: must be a name; allowed: v100-sxm2-32, "),
    ({"device_types": {"a": {"preset": "t4", "memory_bytes": 1}}}, "source: missing; name the source of memory_bytes, which overrides that of preset 't4'"),
    ({"device_types": {"a": {"preset": "t4", "memory": 1}}}, "device_types.a.memory: unknown key; did you mean memory_bytes?"),
    ({"links": [{"between": ["x", "y"], "preset": "pcie9x16"}]}, "there is no preset 'pcie9x16' of links; did you mean pcie"),
    ({"links": [{"between": ["x", "y"]}]}, "links[0].bandwidth_bytes_per_s: missing; so are links[0].latency_s, "),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_preset_that_is_not_there_is_refused_with_those_that_are(changes, message):
    with pytest.raises(UserError) as error:
        cluster_with(**changes)
    assert str(error.value).startswith("c.toml: ")
    assert message in str(error.value)


presets_module = sys.modules["gssim.cluster.presets"]
SCORED = tomllib.loads((Path(presets_module.__file__).parent / "preset_errors.toml").read_text())


@pytest.mark.parametrize("name", SCORED)
def test_errors_of_published_runs_are_those_of_the_presets_figures(name, monkeypatch):
    """Predictions said nothing of how far off they may be, though published runs on the same presets are scored."""
    entry = SCORED[name]
    hint = "figures changed: score anew, python -m analysis literature TABLE... --by-device FILE"
    assert entry["figures"] == digest_of_figures(name), hint
    said = expected_errors([expanded("devices", name)["source"]])
    assert f"{name}: step {entry['step']['median_ratio']:.1%}" in said
    assert 0 < entry["step"]["median_ratio"] <= entry["step"]["nine_in_ten_ratio"] < 1
    monkeypatch.setitem(presets("devices")[name], "efficiency_ratio", 0.123)
    preset_errors.cache_clear()
    monkeypatch.setattr(presets_module, "preset_errors", preset_errors.__wrapped__)
    assert f"{name}: no such runs" in expected_errors([expanded("devices", name)["source"]])


def test_devices_that_were_measured_or_changed_have_no_errors_of_published_runs():
    own = {"efficiency_ratio": 0.5, "source": "timed here"}, {"step_jitter_ratio": 0.3}
    own += ({"efficiency_ratio": 0.5, "source": f"{expanded('devices', 't4')['source']}; timed here"},)
    for changes in own:
        assert expected_errors([expanded("devices", {"preset": "t4", **changes})["source"]]) is None
    assert expected_errors([expanded("devices", "t4")["source"], "measured here"]) is None
    assert expected_errors([expanded("devices", "tpu-v2-chip")["source"]]).endswith("tpu-v2-chip: no such runs")

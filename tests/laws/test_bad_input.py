# ruff: noqa: E501  a fault and its message are one line
"""Invalid input of a user: one line on stderr that names the place, exit code 2, no file written, no traceback."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from strategies import MODEL_TOML, PAIR_TOML, SCENARIO_TOML, write_files

from gssim.cli import commands, main
from gssim.errors import MistakenNameError, UserError
from gssim.scenario import check_kind, load_scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
GS = ("plan.method=gs", "plan.push.threshold=1e-3")


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """Return a function that runs a scenario that must be refused, and returns the line that says why."""

    def run(path, *overrides, command="run"):
        options = [part for override in overrides for part in ("--set", override)]
        out = ["--json", "--out", str(tmp_path / "results")] if command == "run" else []
        monkeypatch.setattr(sys, "argv", ["gssim", command, str(path), *options, *out])
        with pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 2, stderr
        assert stdout == ""
        assert not (tmp_path / "results").exists()
        assert stderr.startswith("gssim: ")
        assert stderr.endswith("\n")
        assert stderr.count("\n") == 1
        assert "Traceback" not in stderr
        return stderr.removeprefix("gssim: ").rstrip("\n")

    return run


def test_a_missing_scenario(refusal, tmp_path):
    assert refusal(tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: no such file"


def test_files_that_were_probably_meant_are_named(refusal, tmp_path):
    pair = tmp_path / "folder" / "pair.toml"
    pair.parent.mkdir()
    pair.touch()
    assert refusal(pair.parent / "pari.toml").endswith(f"no such file; did you mean {pair}?")
    assert refusal(tmp_path / "pair").endswith(f"no such file; did you mean {pair}?")
    assert "it is the name of a model: `gssim fits llama3-8b " in refusal("llama3-8b")
    demo = SCENARIOS / "demo.toml"
    with pytest.raises(UserError, match=r"cluster = 'two-cores': no such file; did you mean clusters/two-cores.toml\?"):
        load_scenario(demo, ["cluster=two-cores"])
    with pytest.raises(UserError, match=r"cluster = 'a/b.toml': no such file; looked for in a, .*scenarios.a$"):
        load_scenario(demo, ["cluster=a/b.toml"])


def test_an_override_of_a_device_type_that_the_cluster_has_not(refusal, tmp_path):
    """It was taken for a new type: `device_types.b200.kind: missing`."""
    line = refusal(write_files(tmp_path), "cluster.device_types.b200.memory_bytes=80 GB")
    assert "device_types.b200: the cluster has no such type; it has " in line
    with pytest.raises(UserError) as of_one_cluster:
        load_scenario(SCENARIOS / "demo.toml", ["cluster.device_types.b200.efficiency_ratio=0.5"])
    assert not isinstance(of_one_cluster.value, MistakenNameError)  # a sweep goes on with clusters that have the type
    two = 'cluster.device_types={intel-r-xeon-r-processor-core={preset="t4"}, b200={preset="t4"}}'
    whole = [two, "cluster.device_types.b200.price_usd_per_h=1", 'cluster.device_types.b200.source="x"']
    types = load_scenario(SCENARIOS / "demo.toml", whole, gradients_needed=False).scenario.cluster.device_types
    assert types["b200"].price_usd_per_h == 1


def test_a_folder_for_a_scenario(refusal, tmp_path):
    assert refusal(tmp_path) == f"{tmp_path}: is a folder, not a file"


@pytest.mark.parametrize("key", ["cluster", "workload.model"])
def test_a_folder_for_a_file_that_the_scenario_names(refusal, tmp_path, key):
    line = refusal(write_files(tmp_path), f"{key}={tmp_path}")
    assert f"{key} = '{tmp_path}': is a folder, not a file" in line


@pytest.mark.parametrize(("key", "kind"), [("cluster", "cluster"), ("workload.model", "model")])
def test_a_file_that_the_scenario_names_and_is_the_scenario_itself(refusal, tmp_path, key, kind):
    path = write_files(tmp_path)
    line = refusal(path, f"{key}={path.name}")
    assert line == f"{path}: is a scenario, not a {kind}; use it with `gssim run {path}`"


def test_a_sweep_that_is_its_own_scenario(refusal, tmp_path):
    path = tmp_path / "itself.toml"
    path.write_text('# Which?\nscenario = "itself.toml"\nvariants.one = { plan.method = "ddp" }\n')
    assert f"{path}: is a sweep, not a scenario; " in refusal(path, command="sweep")


def test_broken_toml(refusal, tmp_path):
    path = write_files(tmp_path, scenario="[plan\n")
    assert refusal(path).startswith(f"{path}: not valid TOML: ")


def test_bytes_that_are_no_text(refusal, tmp_path):
    path = write_files(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path).startswith(f"{path}: cannot be read: it is no text in UTF-8: ")


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 5000])
def test_toml_that_no_parser_takes(refusal, tmp_path, text):
    path = write_files(tmp_path, scenario=text)
    assert refusal(path).startswith(f"{path}: not valid TOML: ")


@pytest.mark.parametrize("name", ["pair.toml", "tiny.toml"])
def test_broken_toml_in_a_file_that_the_scenario_names(refusal, tmp_path, name):
    path = write_files(tmp_path)
    (tmp_path / name).write_text("= 3")
    assert refusal(path).startswith(f"{tmp_path / name}: not valid TOML: ")


def test_a_config_json_is_not_read_as_toml(refusal, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = refusal(write_files(tmp_path), "workload.model=config.json")
    assert f"`gsreal trace {tmp_path / 'config.json'} --out FILE.toml` makes a model file" in said


def test_a_key_that_a_json_file_gives_twice_is_refused(refusal, tmp_path):
    """TOML refuses it; of JSON, the last one counted without a word."""
    (tmp_path / "load.json").write_text('{"skew": 0.5, "skew": 0.6}')
    said = refusal(write_files(tmp_path), "workload.expert_load=load.json")
    assert said == f"{tmp_path / 'load.json'}: skew: is given twice in one table"


def test_sweeps_and_scenarios_are_told_apart(refusal, tmp_path):
    path = write_files(tmp_path)
    (tmp_path / "many.toml").write_text(f'scenario = "{path.name}"\n[axes]\n"run.seed" = [1, 2]\n')
    assert "is a sweep, not a scenario; use it with `gssim sweep " in refusal(tmp_path / "many.toml")
    assert "is a scenario, not a sweep; use it with `gssim run " in refusal(path, command="sweep")


# (scenario text changes, message): the file is the scenario's
SCENARIO_FAULTS = [
    (("[plan]", "sharding = 1\n[plan]"), "workload.sharding: unknown key; allowed: model, gradients, global_batch_size"),
    (("cluster =", "clustr = 1\ncluster ="), "clustr: unknown key; did you mean cluster? allowed: name, question, cluster"),
    (('method = "ddp"', 'method = "ddp"\npush.treshold = 1'), "plan.push.treshold: unknown key; did you mean threshold? allowed: threshold, kind"),
    (("cluster =", '"[bold]x" = 1\ncluster ='), "[bold]x: unknown key; allowed: name, question, cluster"),
    (('method = "ddp"', 'method = "ddp"\n"a[0]" = 1'), "plan.a[0]: unknown key; allowed: method, ranks, dp_replicate"),
    (('method = "ddp"', 'methd = "ddp"'), "plan.methd: unknown key; did you mean method? allowed: method, ranks, dp_replicate"),
    (('method = "ddp"', ""), "plan.method: missing"),
    (('method = "ddp"', 'method = "zero9"'), "plan.method = 'zero9': must be 'single', 'ddp',"),
    (('"pair.toml"', '"pairs.toml"'), "cluster = 'pairs.toml': no such file; did you mean pair.toml?"),
    (('"tiny.toml"', '"huge.toml"'), "workload.model = 'huge.toml': no such file"),
    (('"tiny.toml"', '"llama3-8"'), "workload.model = 'llama3-8': no such file; did you mean llama3-8b?"),
    (('cluster = "pair.toml"', ""), "cluster: missing; name a file or give the table"),
    (('cluster = "pair.toml"', "cluster = 3"), "cluster = 3: "),
    (('model = "tiny.toml"', ""), "workload.model: missing; name a file or give the table"),
    (("global_batch_size = 8", "global_batch_size = 0"), "workload.global_batch_size = 0: must be more than 0"),
    (("global_batch_size = 8", "global_batch_size = -8"), "workload.global_batch_size = -8: "),
    (("global_batch_size = 8", "global_batch_size = 8.0"), "workload.global_batch_size = 8.0: "),
    (("global_batch_size = 8", "global_batch_size = 9"), "workload.global_batch_size = 9: cannot be divided evenly among 2 ranks"),
    (("sequence_length = 4", "sequence_length = 4000"), "sequence_length = 4000: the model takes at most 64"),
    (("sequence_length = 4", ""), "sequence_length: missing"),
    (("global_batch_size = 8", "global_batch_size = 1" + "0" * 30), ": must be at most 1e+15"),
    (("steps = 4", "steps = 0"), "run.steps = 0: "),
    (("steps = 4", "seed = 9" + "9" * 30), "run.seed = 9"),
    (("warmup_steps = 1", "warmup_steps = -1"), "run.warmup_steps = -1: "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), SCENARIO_FAULTS, ids=lambda value: str(value)[:50])
def test_a_fault_in_the_scenario(refusal, tmp_path, change, message):
    assert change[0] in SCENARIO_TOML
    path = write_files(tmp_path, scenario=SCENARIO_TOML.replace(*change, 1))
    for command in ("run", "check"):
        line = refusal(path, command=command)
        assert line.startswith(f"{path}: ")
        assert message in line


CLUSTER_FAULTS = [
    (('"1 MB/s"', '"450 GB"'), 'links[0].bandwidth_bytes_per_s = \'450 GB\': is in bytes, but bytes/s is needed, such as "450 GB/s"'),
    (('"1 MB/s"', '"1e400 MB/s"'), "links[0].bandwidth_bytes_per_s = '1e400 MB/s': is too large"),
    (('"1 MB/s"', '"1e999999999 MB/s"'), "links[0].bandwidth_bytes_per_s = '1e999999999 MB/s': must be a number with a unit of bytes/s"),
    (('"1 MB/s"', "1" + "0" * 400), ": is too large"),
    (('"1 MB/s"', "0"), "links[0].bandwidth_bytes_per_s = 0: must be more than 0"),
    (('"1 MB/s"', "-1"), "links[0].bandwidth_bytes_per_s = -1: "),
    (('"1 MB/s"', "inf"), "links[0].bandwidth_bytes_per_s = inf: "),
    (('"10 us"', '"10 parsec"'), 'links[0].latency_s = \'10 parsec\': has the unknown unit "parsec"'),
    (('"10 us"', "-1"), "links[0].latency_s = -1: "),
    (('"1 GiB"', '"0 GiB"'), "device_types.fast.memory_bytes = '0 GiB': "),
    (('"1 GFLOP/s"', '"1 GB/s"'), "device_types.fast.peak_flop_per_s.fp32 = '1 GB/s': is in bytes/s, but FLOP/s is needed"),
    (('host = "b"', 'hosts = "b"'), "devices[1].hosts: unknown key; did you mean host? allowed: name, type, host"),
    (('type = "fast"', 'type = "quick"'), "'a' has the unknown type 'quick'; allowed: fast"),
    (('between = ["a", "b"]', 'between = ["a", "c"]'), "'c' is neither a device nor a switch"),
    (('between = ["a", "b"]', 'between = ["a", "b"]\nbandwith = 1'), "links[0].bandwith: unknown key; allowed: between, bandwidth_bytes_per_s, latency_s, directed, source"),
    (('name = "b"', 'name = "a"'), "'a' is named twice"),
    (('kind = "cpu"', 'kind = "abacus"'), "device_types.fast.kind = 'abacus': must be 'cpu', 'cuda' or 'tpu'"),
    (('kind = "cpu"', 'kind = "cpu"\nstep_jitter_ratio = true'), "device_types.fast.step_jitter_ratio = True: must be a number"),
    (('backend = "gloo"', 'backend = "gloo"\nalgorithms.allreduce = "ring"'), "algorithms.allreduce: unknown key; allowed: all-reduce, reduce-scatter,"),
    (('backend = "gloo"', 'backend = "gloo"\nbackend_cost = { source = "-", overhead_s = { allreduce = 1 } }'), "overhead_s.allreduce: unknown key; allowed: all-reduce,"),
    (('source = "made by hand for the tests"', ""), "source: missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CLUSTER_FAULTS, ids=lambda value: str(value)[:50])
def test_a_fault_in_a_named_cluster_names_the_clusters_file(refusal, tmp_path, change, message):
    assert change[0] in PAIR_TOML
    line = refusal(write_files(tmp_path, cluster=PAIR_TOML.replace(*change, 1)))
    assert line.startswith(f"{tmp_path / 'pair.toml'}: ")
    assert message in line


MODEL_FAULTS = [
    (('"32000*b*s"', '"32000*x"'), "layers[0].forward_bytes = '32000*x': has the term '32000*x'"),
    (("16x4 b0 b3", "16y4 b0 b3"), "layers[0].parameters[0] = "),
    (("f0 b2@+1 activations 16*b*s", "f0 b2@+1 activation 16*b*s"), "has the category 'activation'; allowed: input, activations, temporaries"),
    (("f0 b2@+1 activations", "f0 b2@1 activations"), "'b2@1' is not a moment"),
    (("vocabulary = 16", "vocabulary = 16, colours = 3"), "input.colours: unknown key; allowed: kind, vocabulary, task, maximum_sequence_length"),
    (("vocabulary = 16", "vocabulary = 0"), "input.vocabulary = 0: "),
    (('kind = "tokens"', 'kind = "sound"'), "input.kind = 'sound': allowed: tokens, image"),
    (('factory = "nowhere.tiny"', ""), "exactly one of factory and hugging_face is needed"),
    (("block = true", "blok = true"), "layers[1].blok: unknown key; did you mean block? allowed: name, modules, block"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MODEL_FAULTS, ids=lambda value: str(value)[:50])
def test_a_fault_in_a_named_model_names_the_models_file(refusal, tmp_path, change, message):
    assert change[0] in MODEL_TOML
    line = refusal(write_files(tmp_path, model=MODEL_TOML.replace(*change, 1)))
    assert line.startswith(f"{tmp_path / 'tiny.toml'}: ")
    assert message in line


PIPELINE = ("plan.method=pipeline", "plan.micro_batches=4")
PLAN_FAULTS = [
    (("plan.shares.batch=[0.5, 0.4]",), "plan.shares.batch = [0.5, 0.4]: sums to 0.9, must sum to 1"),
    (("plan.method=gs", "plan.shares.shards=[0.9, 0.9]"), "plan.shares.shards = [0.9, 0.9]: sums to 1.8, must sum to 1"),
    (("plan.shares.batch=[0.5, 0.25, 0.25]",), "plan.shares.batch: 3 shares for 2 ranks; give one per rank"),
    (("plan.method=single", "plan.shares.batch=[0.5, 0.5]"), "plan.shares.batch: 2 shares for 1 ranks"),
    (("plan.shares.batch=[1.5, -0.5]",), "plan.shares.batch"),
    (("plan.shares.batch=[0.3, 0.7]",), "0.3 of global_batch_size = 8 is no whole number of samples"),
    (("plan.shares.batch=fast",), "plan.shares.batch"),
    (("plan.shares.shards=[0.75, 0.25]",), "plan.shares.shards = [0.75, 0.25]: method 'ddp' cannot shard unevenly; allowed: 'even'"),
    (("plan.method=zero2", "plan.shares.shards=compute"), "method 'zero2' cannot shard unevenly"),
    (("plan.dp_replicate=3",), "plan.dp_replicate = 3: needs 3 ranks, but the cluster has 2 devices"),
    (("plan.method=single", "plan.dp_replicate=2"), "plan.method = 'single': takes one rank, but the mesh axes make 2"),
    (("plan.dp_shard=2",), "plan.dp_shard = 2: method 'ddp' uses dp_replicate"),
    (("plan.method=gs", "plan.dp_replicate=2"), "plan.dp_replicate = 2: method 'gs' uses dp_shard"),
    (("plan.dp_replicate=1",), "plan.dp_replicate = 1: makes 1 of the 2 devices of the cluster; allowed: plan.dp_replicate = 2, or plan.ranks = 1"),
    (("plan.ranks=3",), "plan.ranks = 3: the cluster has 2 devices; allowed: at most 2"),
    (("plan.push.threshold=1e-3",), "plan.push.threshold = 0.001: method 'ddp' pushes no gradients; allowed with gs"),
    (("plan.method=zero2", "plan.push.error_feedback=true"), "plan.push.error_feedback = True: method 'zero2' pushes no gradients"),
    (("plan.publish.threshold=1e-3",), "plan.publish.threshold: method 'ddp' publishes no parameters"),
    (("plan.method=gs", "plan.push.threshold=-1"), "plan.push.threshold = -1: "),
    (("plan.method=gs", "plan.push.threshold=nan"), "plan.push.threshold = nan: "),
    (("plan.method=gs", "plan.push.kind=relative"), "plan.push.kind = 'relative': has no effect without plan.push.threshold"),
    (("plan.method=gs", "plan.push.error_feedback=true"), "plan.push.error_feedback = True: has no effect without plan.push.threshold"),
    ((*GS, "plan.push.kind=target-density", "plan.push.threshold=2"), "plan.push.threshold = 2: with plan.push.kind = 'target-density' it is the fraction to be sent; allowed: more than 0, at most 1"),
    ((*GS, "plan.push.reestimate_steps=8"), "plan.push.reestimate_steps = 8: plan.push.kind = 'absolute' estimates no threshold; allowed with 'target-density'"),
    ((*GS, "plan.push.error_feedback_precision=bf16"), "plan.push.error_feedback_precision = 'bf16': there is no residual; set plan.push.error_feedback = true"),
    ((*GS, "plan.push.warmup_steps=1000"), "plan.push.warmup_steps = 1000: the run has only"),
    (("plan.push=3",), "plan.push = 3: must be a table of keys"),
    (("run.slowdowns=3",), "run.slowdowns = 3: must be an array"),
    (("workload.data.kind=image-folder", "workload.data.folder=there"), "workload.data.kind = 'image-folder': is for classification"),
    (("plan.method=gs", "plan.push.kind=loud"), "plan.push.kind = 'loud': must be 'absolute', 'relative' or 'target-density'"),
    (("plan.bucket_bytes=0",), "plan.bucket_bytes = 0: "),
    (("plan.recompute=selective",), "plan.recompute = 'selective': the model file does not list what the block 'h' keeps: trace it again"),
    (('plan.bucket_bytes="25 MB/s"',), "plan.bucket_bytes = '25 MB/s': is in bytes/s, but bytes is needed"),
    (("plan.bucket_bytes=true",), "plan.bucket_bytes = True: "),
    (("plan.schedule=1f1b",), "plan.schedule = '1f1b': there is no pipeline; leave it out"),
    (("plan.stages=[1, 2]",), "plan.stages = [1, 2]: there is no pipeline; leave it out"),
    (("plan.pp=2",), "plan.pp = 2: method 'ddp' for 1 replica(s) of a pipeline; allowed: pipeline, or plan.dp_replicate"),
    ((*PIPELINE, "plan.pp=1", "plan.dp_replicate=2"), "plan.method = 'pipeline': its gradients"),
    (("plan.method=gs_hier", "plan.pp=2"), "plan.pp = 2: method 'gs_hier' cannot run in a pipeline yet; allowed today: pipeline, or ddp, zero1, zero2"),
    ((*PIPELINE, "plan.stages=[2, 3]"), "plan.stages = [2, 3]: sums to 5, but the model has 4 layers"),
    ((*PIPELINE, "plan.stages=[2, 1, 1]"), "plan.stages = [2, 1, 1]: 3 stages cannot be divided evenly among 2 ranks (plan.pp)"),
    ((*PIPELINE, "plan.stages=[1, 1, 1, 1]"), "plan.schedule: '1f1b' takes one stage on each of 2 ranks, not 4 stages"),
    ((*PIPELINE, "plan.micro_batches=3"), "plan.micro_batches = 3: a replica has 8 samples; a pipeline's micro-batches must be equal"),
    (("plan.method=pipeline", "plan.schedule=1f1b"), "plan.schedule: '1f1b' needs at least as many micro-batches as stages: 2, not 1"),
    ((*PIPELINE, "plan.gradient_sync=micro-batch"), "plan.gradient_sync = 'micro-batch': torch's stages let gradients leave in the last"),
]  # fmt: skip

NOT_YET = [
    (("plan.prefetch=1",), "plan.prefetch: unknown key"),
    (("plan.method=gs_wgrad", "plan.tp=2"), "plan.tp = 2: cannot run yet beside plan.partition = 'weight-gradient'"),
    (("plan.method=tensor",), "workload.model: has no slices of its blocks for 2 tensor-parallel ranks; trace it again"),
    (("plan.method=gs_tp",), "workload.model: has no slices of its blocks for 2 tensor-parallel ranks; trace it again"),
    (("plan.method=gs_z3", "plan.exchange=backend"), "plan.exchange = 'backend': cannot run yet with method 'gs_z3'; allowed"),
    (("plan.method=gs_hier", "plan.exchange=backend"), "plan.exchange = 'backend': cannot run yet with method 'gs_hier'; allowed"),
    (("plan.method=gs_hier", "plan.parameters=sharded"), "plan.parameters = 'sharded': cannot run yet with method 'gs_hier'"),
    (("plan.tp=2", "plan.dp_replicate=1"), "workload.model: has no slices of its blocks for 2 tensor-parallel ranks"),
    (("plan.parameters=gathered",), "cannot run yet"),
    (("plan.method=gs_wgrad", "plan.publish.threshold=1e-3"), "plan.publish.threshold = 0.001: cannot run yet with method 'gs_wgrad'"),
    (("plan.method=gs_wgrad", "plan.publish.overlap=true"), "plan.publish.overlap = true: cannot run yet with method 'gs_wgrad'"),
    (("plan.method=single", "plan.shares.replan=true"), "plan.shares.replan = True: method 'single' with plan.tp = 1 and plan.pp = 1 does not divide the batch among all ranks; allowed: ddp,"),
    (("plan.method=gs", "plan.shares.replan=true", "plan.shares.batch=[1,0]"), "plan.shares.replan = True: rank 1 has no samples to measure its speed by"),
    (("run.slowdowns=[{rank=2,first_step=0,compute_ratio=2}]",), "run.slowdowns[0].rank = 2: the plan has 2 ranks; allowed: a lower number"),
    (("run.slowdowns=[{rank=1,first_step=4,compute_ratio=2}]",), "run.slowdowns[0].first_step = 4: the run has 4 steps (run.steps); allowed: a lower number"),
    (("run.slowdowns=[{rank=1,first_step=0,compute_ratio=0.5}]",), "run.slowdowns[0].compute_ratio = 0.5: must be at least 1"),
    (("plan.method=gs_hier", "plan.dp_shard=1", "plan.dp_replicate=2", "plan.shares.shards=cost"), "plan.shares.shards = 'cost': cannot run yet with method 'gs_hier'"),
    (("plan.method=gs_wgrad", "plan.shares.shards=memory"), "plan.shares.shards = 'memory': cannot run yet with method 'gs_wgrad'"),
    (("cluster.device_types.fast.optimizers.adam-w={tensor_s=1, elements_s={sizes=[1], values=[1]}}",), "device_types.fast.optimizers.adam-w: unknown key; allowed: sgd,"),
    (("plan.shares.replanning.drift_ratio=inf",), "plan.shares.replanning.drift_ratio = inf: must be at most 1e+06"),
    (("plan.micro_batches=0",), "plan.micro_batches = 0: must be more than 0"),
    (("plan.overlap=3",), "plan.overlap = 3: must be true or false"),
    (("run.steps=1.5",), "run.steps = 1.5: must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), PLAN_FAULTS + NOT_YET, ids=lambda value: str(value)[:60])
def test_a_plan_that_cannot_be(refusal, tmp_path, overrides, message):
    path = write_files(tmp_path)
    line = refusal(path, *overrides)
    assert line.startswith(f"{path}: ")
    assert message in line


@pytest.mark.parametrize("method", ["zero2", "zero3", "hsdp"])
def test_a_scalar_is_no_parameter_that_fsdp2_could_shard(refusal, tmp_path, method):
    """A prediction answered, and the ranks ended in torch's own error."""
    model = MODEL_TOML.replace("{}.bias 4 b0 b1", "{}.bias scalar b0 b1")
    path = write_files(tmp_path, model=model)
    assert "FSDP2 cannot shard a scalar such as h.0.bias" in refusal(path, f"plan.method={method}")
    load_scenario(path, ["plan.method=zero1"])


@pytest.mark.parametrize("name", ["", "a/b", "../../x", '"a\\u0000b"', "3"])
def test_a_name_that_no_file_can_have(refusal, tmp_path, name):
    assert ": name = " in refusal(write_files(tmp_path), f"name={name}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.method", "--set plan.method: must be KEY=VALUE, such as plan.push.threshold=1e-3"),
        ("=3", "--set =3: must be KEY=VALUE"),
        ("run.steps.x=1", "--set run.steps.x: run.steps names a file or a value, not a table"),
        ("cluster.backend.x=1", "--set cluster.backend.x: cluster.backend names a file or a value, not a table"),
        (
            "cluster.links.7.directed=true",
            "--set cluster.links.7.directed: cluster.links has 1 entries, counted from 0",
        ),
        ("cluster.nam=x", "pair.toml: nam: unknown key; did you mean name?"),
        ("workload.model.nam=x", "tiny.toml: nam: unknown key; did you mean name?"),
        ("plan.metod=ddp", "plan.metod: unknown key; did you mean method?"),
        ("plan.tensor_parallel_size=2", "plan.tensor_parallel_size: unknown key; did you mean tp?"),
        ("plan.batch_size=2", "plan.batch_size: unknown key; did you mean workload.global_batch_size?"),
        ("workload.precision=bfloat16", "'fp16' or 'fp64'; did you mean 'bf16'?"),
        ("method=ddp", "method: unknown key; did you mean plan.method? allowed: name, question"),
        (
            "plan.threshold=1e-3",
            "plan.threshold: unknown key; did you mean plan.push.threshold? allowed: method, ranks",
        ),
        ("plan.precision=bf16", "plan.precision: unknown key; did you mean workload.precision?"),
        ("plan.method=dpp", "'gs_tp' or 'gs_hier'; did you mean 'ddp'?"),
        ("workload.optimizer=Adam", "'adamw' or 'muon'; did you mean 'adam'?"),
        ("plan.shares.batch=[half]", "--set plan.shares.batch=[half]: is no array as TOML writes it: texts in it need"),
        ("workload.model=models/none.toml", "workload.model = 'models/none.toml': no such file"),
        ("plans.method=ddp", "plans: unknown key; did you mean plan?"),
        ("plan=ddp", "plan = 'ddp': "),
        ("cluster=nowhere.toml", "cluster = 'nowhere.toml': no such file"),
        ("run.steps=many", "run.steps = 'many': "),
        ("run.steps=", "run.steps = '': "),
    ],
)
def test_a_bad_override(refusal, tmp_path, override, message):
    assert message in refusal(write_files(tmp_path), override)


def test_a_cluster_that_is_given_for_a_scenario_is_named_as_one(refusal, tmp_path):
    write_files(tmp_path)
    assert "pair.toml: is a cluster, not a scenario; use it with `gssim run SCENARIO" in refusal(tmp_path / "pair.toml")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("clusters/two-cores.toml", "cluster"),
        ("models/gpt-byte-1m.toml", "model"),
        ("studies/gpt-byte.toml", "study"),
        ("sweeps/demo.toml", "sweep"),
    ],
)
def test_files_that_ship_are_of_one_kind_each(file, kind):
    path = str(SCENARIOS / file)
    data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    check_kind(data, kind, path)
    for other in {"scenario", "sweep", "cluster", "model"} - {kind}:
        with pytest.raises(UserError, match=rf"{path}: is a {kind}, not a {other}; use it with `[^`]*{path}`"):
            check_kind(data, other, path)


# Gradient statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["", 'gradients = "transferred"'])
def test_a_threshold_without_statistics_takes_those_of_the_models_family(tmp_path, gradients):
    path = write_files(tmp_path, scenario=SCENARIO_TOML.replace('gradients = "tiny.json"', gradients))
    loaded = load_scenario(path, GS)
    assert loaded.gradients is not None
    assert loaded.gradients.transfer is not None
    assert loaded.gradients.transfer.family == "gpt"


def test_statistics_that_cover_too_few_steps(refusal, tmp_path):
    line = refusal(write_files(tmp_path), *GS, "run.steps=8")
    assert "workload.gradients = 'tiny.json': covers 8 steps, but the run has 9" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.optimizer=sgd", "was taken with optimizer = 'adamw', not 'sgd'"),
        ("workload.learning_rate=0.5", "was taken with learning_rate = 0.001, not 0.5"),
        ("workload.global_batch_size=4", "was taken with global_batch_size = 8, not 4"),
        ("workload.sequence_length=8", "was taken with sequence_length = 4, not 8"),
        ("workload.gradients=none.json", "workload.gradients = 'none.json': no such file"),
    ],
)
def test_statistics_of_another_training(refusal, tmp_path, override, message):
    assert message in refusal(write_files(tmp_path), *GS, override)


def forget_a_tensor(data):
    del data["traces"][-1]["tensors"]["h.0.bias"]


def forget_every_trace(data):
    data["traces"] = []


def forget_a_sketch(data):
    data["traces"][0]["tensors"]["h.0.bias"]["blocks"][0]["sketches"].pop()


def forget_a_feedback_threshold(data):
    data["feedback_thresholds"].pop()


def forget_a_change(data):
    data["changes"]["h.0.bias"]["blocks"][0].pop()


def forget_the_sampled_steps(data):
    data["sampled_steps"] = []


def forget_the_model(data):
    del data["model"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (forget_a_tensor, "lacks the parameter h.0.bias"),
        (forget_every_trace, "traces = []: at least one is needed"),
        (forget_a_sketch, "sketches of h.0.bias"),
        (forget_a_feedback_threshold, "feedback of "),
        (forget_a_change, "changes of h.0.bias"),
        (forget_the_sampled_steps, "sampled_steps"),
        (forget_the_model, "model: missing"),
    ],
)
def test_statistics_with_holes(refusal, tmp_path, damage, message):
    path = write_files(tmp_path)
    data = json.loads((tmp_path / "tiny.json").read_text())
    data["traces"] = [*data["traces"], json.loads(json.dumps(data["traces"][0]))]
    damage(data)
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    line = refusal(path, *GS)
    assert "tiny.json" in line
    assert message in line


def test_statistics_without_changes_of_parameters_are_of_no_use_to_a_threshold_of_publications(refusal, tmp_path):
    path = write_files(tmp_path)
    data = json.loads((tmp_path / "tiny.json").read_text())
    del data["changes"]["h.0.bias"]
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    line = refusal(path, *GS, "plan.publish.threshold=1e-3")
    assert "has no changes of h.0.bias, which plan.publish.threshold needs" in line


def test_statistics_of_another_version(refusal, tmp_path):
    path = write_files(tmp_path)
    data = json.loads((tmp_path / "tiny.json").read_text())
    (tmp_path / "tiny.json").write_text(json.dumps(data | {"schema": "gssim.gradients/2"}))
    line = refusal(path, *GS)
    assert f"{tmp_path / 'tiny.json'}: schema: 'gssim.gradients/2' is not 'gssim.gradients/3'" in line
    assert "gsreal gradients SCENARIO" in line


def test_statistics_that_are_no_json(refusal, tmp_path):
    path = write_files(tmp_path)
    (tmp_path / "tiny.json").write_text("{")
    assert f"{tmp_path / 'tiny.json'}: not a JSON file" in refusal(path, *GS)


# What shows only when simulating -------------------------------------------------------------------------------------


def test_a_precision_that_the_device_has_no_peak_for(refusal, tmp_path):
    said = refusal(write_files(tmp_path), "workload.precision=fp64")
    assert "cluster: device_types.fast: no peak_flop_per_s.fp64" in said  # of several types, which one


def test_devices_that_no_links_connect(refusal, tmp_path):
    unlinked = PAIR_TOML[: PAIR_TOML.index("[[links]]")]
    path = write_files(tmp_path, cluster=unlinked)
    assert refusal(path).startswith(f"{path}: cluster.links: there is no path of links from ")


@pytest.mark.parametrize(
    ("option", "place"), [("--out", "taken"), ("--trace", "taken/trace.json"), ("--out", "x" * 300)]
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_simulated(
    monkeypatch, capsys, tmp_path, option, place
):
    path = write_files(tmp_path)
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(commands, "simulate", lambda *_, **__: pytest.fail("simulated"))
    monkeypatch.setattr(sys, "argv", ["gssim", "run", str(path), option, str(tmp_path / place)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--out", ""), ("--out=",)])
def test_an_empty_place_is_not_the_working_folder(gssim, tmp_path, monkeypatch, words):
    path = write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, _, err = gssim("run", path, *words)
    assert (code, err) == (2, "gssim: --out '': is empty; allowed: a path, such as . for the working folder\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_folder_where_a_file_is_to_be_written(monkeypatch, capsys, tmp_path, option):
    path = write_files(tmp_path)
    taken = tmp_path / "taken"
    (taken if option == "--trace" else taken / f"pair.{load_scenario(path).scenario.scenario_id}.simulated.json").mkdir(
        parents=True
    )
    monkeypatch.setattr(sys, "argv", ["gssim", "run", str(path), "--set", "name=pair", option, str(taken)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cannot be written: it is a folder" in capsys.readouterr().err
    assert not list(taken.glob(".*"))


@pytest.mark.slow  # test_packaging.py runs it too
def test_the_installed_command_does_the_same(tmp_path):
    call = [
        sys.executable,
        "-c",
        "from gssim.cli.commands import main; main()",
        "run",
        str(tmp_path / "none.toml"),
        "--json",
    ]
    ended = subprocess.run([*call, "--out", str(tmp_path / "results")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"gssim: {tmp_path / 'none.toml'}: no such file\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (900, "its keys are nested too deep"),
        (5000, "not valid TOML: TOML key has more than the allowed 1000 parts"),
    ],
)
def test_keys_that_are_nested_without_brackets(refusal, tmp_path, parts, reason):
    """A dotted key of thousands of parts ended in a RecursionError of three thousand lines."""
    path = tmp_path / "deep.toml"
    path.write_text("a." * parts + "b = 1\n")
    assert refusal(path) == f"{path}: {reason}"


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        (">&-", 1, "gssim: output cannot be written: Bad file descriptor\n"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 1, ""),
    ],
)
def test_a_closed_stdout_is_an_error_and_a_closed_stderr_is_none(tmp_path, closed, code, said):
    """`gssim run FILE >&-` ended in an AttributeError, then with exit code 0 though it printed nothing."""
    write_files(tmp_path)
    command = f"{sys.executable} -m gssim run {tmp_path}/scenario.toml --out {tmp_path}/out {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, said)
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.parametrize("key", ["seeds", "dense", "silent"])
def test_a_study_that_lacks_a_key_is_not_taken_for_a_sweep(key):
    data = tomllib.loads((SCENARIOS / "studies/gpt-byte.toml").read_text(encoding="utf-8"))
    del data[key]
    check_kind(data, "study", "study.toml")

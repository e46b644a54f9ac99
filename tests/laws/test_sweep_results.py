"""Results of a sweep are joined and judged within their groups: clusters of other rates alone ask the same question."""

from results import in_file, make_result

from analysis.compare.comparison import compare, join


def test_groups_that_ask_the_same_question_are_joined_each_for_itself():
    times_s = {("slow--ddp", "simulated"): 4.0, ("slow--ddp", "measured"): 5.0}
    times_s |= {("fast--ddp", "simulated"): 1.0, ("fast--ddp", "measured"): 2.0}
    joined = join(in_file(make_result(side, name=name, step_time_s=t), name) for (name, side), t in times_s.items())
    assert (joined.unmatched, joined.superseded) == ((), ())
    rows = compare(joined.pairs).select("name", "step_time_predicted_s", "step_time_measured_s").rows()
    assert rows == [("fast--ddp", 1.0, 2.0), ("slow--ddp", 4.0, 5.0)]


def test_a_group_without_measurements_does_not_borrow_those_of_another():
    files = [in_file(make_result("simulated", name="slow--ddp"), "s"), in_file(make_result("measured", name="f--ddp"))]
    joined = join(files)
    assert joined.pairs == ()
    assert len(joined.unmatched) == 2


def test_thresholds_are_measured_by_the_dense_run_of_their_own_group():
    made = []
    for group, dense_s, sparse_s in (("slow", 4.0, 1.0), ("fast", 1.0, 2.0)):
        for side in ("simulated", "measured"):
            dense = {"scenario_id": "dense", "name": f"{group}--gs", "step_time_s": dense_s}
            sparse = {"scenario_id": "sparse", "name": f"{group}--gs-1e-3", "step_time_s": sparse_s, "threshold": 1e-3}
            made += [make_result(side, **dense), make_result(side, **sparse)]
    rows = compare(join(map(in_file, made)).pairs).select("name", "speed_up_over", "speed_up_measured_ratio").rows()
    assert [row for row in rows if row[1]] == [("fast--gs-1e-3", "fast--gs", 0.5), ("slow--gs-1e-3", "slow--gs", 4.0)]

"""Which scenarios have the same programs: those that agree in all that lowering reads."""

import json
from collections.abc import Hashable, Mapping
from dataclasses import fields

from pydantic import TypeAdapter

from gssim.cluster import Cluster, DeviceType
from gssim.gradients import GradientStatistics
from gssim.scenario import Scenario
from gssim.shared import Same, Shared

NOT_READ = frozenset({"model", "gradients", "data"})
"""Of a workload: what is not lowered, and the model, which is known by being the same."""

_DEVICE_TYPES: TypeAdapter[Mapping[str, DeviceType]] = TypeAdapter(Mapping[str, DeviceType])


def what_lowering_reads(
    scenario: Scenario, statistics: GradientStatistics | None, shared: Shared
) -> tuple[Hashable, ...]:
    """Return a key that is equal where programs are: of the cluster nothing but devices and the backend's costs.

    How it is wired counts only where shares follow from that, which are in it.
    """
    cluster, workload, ranks = scenario.cluster, scenario.workload, scenario.ranks
    return (
        shared.once("devices", (Same(cluster), ranks), lambda: _devices(cluster, ranks)),
        cluster.backend,
        Same(workload.model),
        tuple(getattr(workload, each.name) for each in fields(workload) if each.name not in NOT_READ),
        scenario.plan,
        scenario.policies,
        scenario.batch_sizes,
        scenario.shard_shares,
        (scenario.run.steps, scenario.run.warmup_steps),
        Same(statistics),
    )


def _devices(cluster: Cluster, ranks: int) -> str:
    """Return what the first devices are, and what the backend costs, as text: equal in other clusters, too."""
    kinds = [device.type for device in cluster.devices[:ranks]]
    used = {name: cluster.device_types[name] for name in dict.fromkeys(kinds)}
    costs = cluster.backend_cost
    plain = TypeAdapter(type(costs)).dump_python(costs, mode="json") if costs else None
    return json.dumps([kinds, _DEVICE_TYPES.dump_python(used, mode="json"), plain])

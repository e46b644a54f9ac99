"""Watches whether the model still trains what its owners update: checked in every step, in one pass over references.

Moving, casting, replacing or assigning parameters leaves the buckets behind, and from then on nothing that is published
reaches the model. Writing into parameters is seen by torch's version counters, where owners keep master copies that the
next step would publish over it; writing through `.data` is not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gsreal.gradient_sharding.bucket import Bucket

REMEDY = "move, cast and load (.to, .half, assign=True, to_empty) before shard_gradients, or call it again"


class Watch:
    """Where a model's parameters were when they were put into buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self.model, self.buckets, self.names = model, buckets, names
        self._versions: dict[nn.Parameter, int] = {}
        self._note_links()
        self.note_versions()

    def _note_links(self) -> None:
        """Note what every module has, by reference."""
        self._registries: list[dict[str, Any]] = [
            registry for module in self.model.modules() for registry in (module._parameters, module._modules)
        ]
        self._members = self._listed()
        self._kept = [
            each for registry in self._registries for each in registry.values()
        ]  # so that no id is used again

    def _listed(self) -> list[int]:
        return [id(each) for registry in self._registries for each in registry.values()]

    def check(self) -> None:
        """Raise RuntimeError where a parameter is trained by nobody: it was replaced, or left its bucket."""
        if self._listed() != self._members:
            self._check_members()
            self._note_links()
        for bucket in self.buckets:
            self.check_places(bucket)

    def check_places(self, bucket: Bucket) -> None:
        """Raise RuntimeError where a parameter is not where its bucket has it."""
        addresses, now = bucket.addresses(), [(p.data_ptr(), p.shape) for p in bucket.parameters]
        if now != addresses:
            name = next(self.names[p] for p, a, b in zip(bucket.parameters, now, addresses, strict=True) if a != b)
            raise RuntimeError(f"{name} is no longer in its bucket and would not train: {REMEDY}")

    def _check_members(self) -> None:
        """Raise RuntimeError where the model has parameters to train that are in no bucket, or lacks some that are."""
        now = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, name in now.items():
            if parameter.requires_grad and parameter not in self.names:
                raise RuntimeError(f"{name} was put into the model after shard_gradients and would not train: {REMEDY}")
        for parameter, name in self.names.items():
            if parameter not in now:
                raise RuntimeError(f"{name} is no longer in the model, which would not train: {REMEDY}")

    # Master copies ----------------------------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """Take what is in the parameters now as what owners have published."""
        self._versions = {
            parameter: parameter._version
            for bucket in self.buckets
            if bucket.has_master and bucket.holds_values
            for parameter in bucket.parameters
        }

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Bring what was written into parameters since to their owners' master copies."""
        written = {parameter for parameter, version in self._versions.items() if parameter._version != version}
        if not written:
            return
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter in written:
                    bucket.adopt(bucket.owned(parameter)[1])
        self.note_versions()

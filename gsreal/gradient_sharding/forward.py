"""A module's forward, which waits for the parameters that it reads, where they are still under way to the replica."""

from typing import Any, Protocol

from torch import nn

from gsreal.gradient_sharding.bucket import Bucket


class Arrivals(Protocol):
    """Parameters that may still be under way (a `Publisher`)."""

    @property
    def under_way(self) -> bool:
        """Whether any are."""

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's are there."""

    def finish(self) -> None:
        """Return once all are there."""


class ForwardWaits:
    """Hooks that let every module wait for the buckets of its own parameters just before its forward.

    Some modules' parameters are read by another's forward, without a call of their own (`nn.MultiheadAttention` reads
    its `out_proj`): whoever is above a module that was never called yet waits for its buckets too. So the first forward
    waits for everything at its beginning, and later ones just in time. Reading a whole model's state waits for all.
    Copies of the model wait for nothing, and are refused while anything is under way.
    """

    def __init__(self, module: nn.Module, buckets: list[Bucket], arrivals: Arrivals | None) -> None:
        self.arrivals = arrivals
        self.called: set[nn.Module] = set()
        of_parameter = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self.read_by = {
            each: list(dict.fromkeys(of_parameter[p] for p in each.parameters(recurse=False) if p in of_parameter))
            for each in module.modules()
        }
        for each in module.modules():
            each.register_forward_pre_hook(self._before_forward)
            each.register_state_dict_pre_hook(self._before_state)
            each.register_load_state_dict_pre_hook(self._before_state)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self.arrivals is None:
            return
        self.called.add(module)
        for each in module.modules():
            if each is module or each not in self.called:
                for bucket in self.read_by.get(each, ()):
                    self.arrivals.wait(bucket)

    def _before_state(self, *_arguments: Any) -> None:
        if self.arrivals is not None:
            self.arrivals.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copied or saved model gets hooks that wait for nothing."""
        if self.arrivals is not None and self.arrivals.under_way:
            raise RuntimeError("parameters are under way to this model: call optimizer.finish() before it is copied")
        return ForwardWaits, (nn.Module(), [], None)

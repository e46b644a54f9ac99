"""A module's forward, which waits for the parameters that it reads, where they are still under way to the replica."""

from collections.abc import Callable
from typing import Any

from torch import nn

from gsreal.gradient_sharding.bucket import Bucket


class ForwardWaits:
    """Hooks that let every module wait for the buckets of its own parameters just before its forward.

    Some modules' parameters are read by another's forward, without a call of their own (`nn.MultiheadAttention` reads
    its `out_proj`): whoever is above a module that was never called yet waits for its buckets too. So the first forward
    waits for everything at its beginning, and later ones just in time. Reading a whole model's state waits for all.
    """

    def __init__(
        self, module: nn.Module, buckets: list[Bucket], wait: Callable[[Bucket], None], finish: Callable[[], None]
    ) -> None:
        self.wait, self.finish = wait, finish
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
        self.called.add(module)
        for each in module.modules():
            if each is module or each not in self.called:
                for bucket in self.read_by.get(each, ()):
                    self.wait(bucket)

    def _before_state(self, *_arguments: Any) -> None:
        self.finish()

"""Optimizer with fp32 master copies of low-precision parameters.

    optimizer = MasterCopy(model.bfloat16().parameters(), torch.optim.AdamW, lr=1e-3)

Used like any other optimizer from then on. The reason is in Micikevicius et al. 2018, "Mixed precision training",
section 3.1: an update that is small relative to its parameter is lost in bf16, whose significand has 8 bits, but
accumulates in the master copy. Memory in addition to the parameters: 4 bytes an element for the master copy, the inner
optimizer's state in fp32, and during the update the gradients cast to fp32. Values written to parameters in place
(loaded, clamped) are copied into the master copies by the next step, unless written through `.data`, which torch does
not count.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MASTER = torch.float32


def master_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which parameters of type `dtype` are updated: at least fp32."""
    return torch.promote_types(dtype, MASTER)


class MasterCopy(torch.optim.Optimizer):
    """An optimizer of type `kind` over fp32 copies of the parameters; after each step they are cast back."""

    def __init__(
        self,
        params: Iterable[Any],
        kind: Callable[..., torch.optim.Optimizer],
        **settings: Any,
    ) -> None:
        super().__init__(params, settings)
        groups = [
            {**group, "params": [nn.Parameter(p.detach().to(master_type(p.dtype), copy=True)) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = kind(groups, **settings)
        self.state = self.inner.state
        self.gradient_factor = 1.0
        """Factor on the gradients, once they are cast: the inverse of the factor on the loss."""
        self._seen = self._now()

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter with its master copy."""
        for group, copies in zip(self.param_groups, self.inner.param_groups, strict=True):
            yield from zip(group["params"], copies["params"], strict=True)

    def _now(self) -> list[tuple[int, int]]:
        """Return the parameters' versions and addresses, which change on a write or a replacement."""
        return [(parameter._version, parameter.data_ptr()) for parameter, _ in self.pairs()]

    def _adopt_writes(self) -> None:
        """Copy values written to parameters since the last update, except where they equal the rounded master copy."""
        for (parameter, master), seen, now in zip(self.pairs(), self._seen, self._now(), strict=True):
            if now != seen:
                unchanged = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(unchanged, master, parameter.to(master.dtype)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the master copies by the parameters' gradients, then the parameters from them; takes no closure."""
        assert closure is None, "a master copy is updated without a closure"
        for group, copies in zip(self.param_groups, self.inner.param_groups, strict=True):
            copies.update({key: value for key, value in group.items() if key != "params"})  # a scheduler's changes
        self._adopt_writes()
        for parameter, master in self.pairs():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
            if master.grad is not None and self.gradient_factor != 1:
                master.grad.mul_(self.gradient_factor)
        self.inner.step()
        for _, master in self.pairs():
            master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Cast the master copies to the parameters, all or some, after they were changed by others than `step`."""
        chosen = None if parameters is None else set(map(id, parameters))
        for parameter, master in self.pairs():
            if chosen is None or id(parameter) in chosen:
                parameter.copy_(master)
        self._seen = self._now()

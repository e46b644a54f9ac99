"""A device that is not there: tensors in the host's memory that say they are on a GPU, and a backend for them alone.

It stands for a machine with GPUs, where `init_process_group()` makes nccl for them and nothing for the host's tensors.
Whatever mixes tensors of host and device, hands a host's tensor to the process group, or looks at a device's values as
if they were in the host's memory raises an error, as it would there. Nothing runs beside anything.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.distributed_c10d import Backend, ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gsreal.gradient_sharding.pushed_gradient import PushedGradient

DEVICE = torch.device("cuda", 0)
BACKEND = "fakenccl"
SYNCHRONISING = ("item", "tolist", "nonzero", "cpu", "__int__", "__float__", "__bool__", "__index__")
"""Functions of a tensor for which the host waits for the device."""


class OnDevice(torch.Tensor):
    """A tensor that says that it is on the device; what is computed from it is too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return DEVICE
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name not in ("copy_", "to", "__get__", "__set__"):
            check_same_device(name, [*args, *kwargs.values()])
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func == torch.Tensor.grad.__get__:
                if type(result) is torch.Tensor and not result.is_sparse:
                    args[0].grad = result = result.as_subclass(cls)
                return result
            if isinstance(result, torch.Tensor):
                return moved(result)
            plain = result is None or isinstance(result, bool | int | float | torch.Size)
            return result if plain else tree_map(moved, result)


def tensors_in(values):
    """Return the tensors among values and in their lists, tuples and dicts, in a tenth of torch's time."""
    found = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors_in(each)
        elif isinstance(each, dict):
            found += tensors_in(each.values())
    return found


def check_same_device(name, values):
    leaves = [each for each in tensors_in(values) if each.ndim]
    if any(isinstance(each, OnDevice) for each in leaves):
        odd = [each for each in leaves if not isinstance(each, OnDevice | PushedGradient) and not each.is_sparse]
        if odd:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")


def moved(value):
    """Return a tensor on the device that has the memory of one."""
    plain = type(value) in (torch.Tensor, nn.Parameter)
    return value.as_subclass(OnDevice) if plain and not value.is_sparse else value


class Device(TorchFunctionMode):
    """Makes tensors on the device where that is asked for, and counts how often the host waits for it."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        on_device = any(isinstance(each, OnDevice) for each in args[:1])
        if on_device and name in SYNCHRONISING:
            self.waits[name] += 1
        if name == "backward":  # what its hooks do is done on the device too
            loss, end = args[0], torch.ones_like(args[0])
            with self:
                return torch.autograd.graph._engine_run_backward(
                    (loss,), (end,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if name == "_has_compatible_shallow_copy_type":
            return type(args[0]) is type(args[1])
        if name == "cuda" or (name == "to" and "cuda" in map(type_of, (*args[1:], *kwargs.values()))):
            others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
            return moved(args[0].detach().to(*others, copy=True)) if not on_device else args[0].to(*others)
        if on_device and (name == "cpu" or (name == "to" and "cpu" in map(type_of, (*args[1:], *kwargs.values())))):
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].clone().as_subclass(torch.Tensor)
        if type_of(kwargs.get("device")) == "cuda" and not any(isinstance(each, torch.Tensor) for each in args):
            return moved(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def type_of(value):
    """Return the type of a device, however it is said; None: that is no device."""
    if isinstance(value, str):
        return value.split(":")[0]
    return value.type if isinstance(value, torch.device) else None


class Wire(TorchDispatchMode):
    """Refuses every tensor that nccl could not send or receive, and counts what it carries."""

    def __init__(self):
        super().__init__()
        self.carried = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            if not all(isinstance(each, OnDevice) for each in tensors_in([*args, *(kwargs or {}).values()])):
                raise RuntimeError("No backend type associated with device type cpu")
            self.carried[func._schema.name.removeprefix("c10d::")] += 1
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Stream:
    """A stream in which everything is done at once; `last_exchange` stands for what it still reads until waited for."""

    def __init__(self, *_device):
        self.device = DEVICE

    def wait_stream(self, _other):
        pass

    def wait_event(self, _event):
        pass

    def record_event(self):
        return object()


def create(store, rank, size, timeout):
    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def carry_by_gloo(group):
    """Make the device's backend really carry its tensors, by gloo: they are in the host's memory."""
    if isinstance(group, ProcessGroup):
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, group._get_backend(DEVICE))
    return group


@contextmanager
def a_machine_with_gpus():
    """Pretend to be on a machine with GPUs inside the context; to be entered before `init_process_group`."""
    if BACKEND.upper() not in Backend._plugins:
        Backend.register_backend(BACKEND, create, devices=["cuda"])
    new_group, init = dist.new_group, dist.init_process_group

    def init_process_group(*arguments, **options):
        init(*arguments, **options)
        carry_by_gloo(dist.group.WORLD)

    stubs = {
        "torch._C._get_accelerator": lambda *_check: DEVICE,
        "torch.distributed.new_group": lambda *a, **options: carry_by_gloo(new_group(*a, **options)),
        "torch.distributed.init_process_group": init_process_group,
        "torch.cuda.Stream": Stream,
        "torch.cuda.current_stream": lambda *_device: Stream(),
        "torch.cuda.stream": lambda _stream: nullcontext(),
    }
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(patch(name, stub))
        stack.enter_context(patch.dict(Backend.default_device_backend_map, {"cuda": BACKEND}))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        yield

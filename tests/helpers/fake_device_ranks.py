"""Loops on a machine with GPUs (`fake_device`), on every rank of a test, beside the same loops on the host.

Arguments: as those of `library_ranks`.
"""

import re
import sys
import warnings
import weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fake_device import BACKEND, DEVICE, Device, OnDevice, Stream, Wire, a_machine_with_gpus, carry_by_gloo
from library_ranks import SGD, batches, mlp, own, raises, report, sharded, train
from torch.distributed.device_mesh import init_device_mesh

from gsreal.gradient_sharding.messages import Encoding
from gsreal.gradient_sharding.point_to_point import backend_of, runs_on_device
from gsreal.gradient_sharding.side_stream import SideStream
from gsreal.run.rank import run_on_rank
from gssim.plan import Publish, Push

README = Path(__file__).resolve().parents[2] / "README.md"
SOON = timedelta(seconds=4)
PUBLISH = Publish(threshold=1e-3, kind="relative", encoding="coo")
FORMS = {
    "dense": {},
    "at the backend's": {"point_to_point": False},
    "waited for": {"overlap": False},
    "coo": {"push": Push(threshold=5e-3, encoding="coo")},
    "bitmap": {"push": Push(threshold=5e-3, encoding="bitmap", error_feedback=True)},
    "relative": {"push": Push(threshold=0.5, kind="relative"), "point_to_point": False},
    "target": {"push": Push(threshold=0.2, kind="target-density", aggregate="received-weight")},
    "published": {"push": Push(threshold=5e-3), "publish": PUBLISH},
    "published beside": {"push": Push(threshold=5e-3), "publish": PUBLISH, "publish_overlaps": True},
    "published densely beside": {"publish_overlaps": True},
    "sharded": {"parameters": "sharded"},
}


def on_device(data):
    """Yield batches on the device."""
    for inputs, targets in data:
        yield inputs.cuda(), targets.cuda()


def trained(form, device=False):
    """Return a model trained in one of the forms, and its optimizer."""
    model = mlp(torch.float32)
    data = batches(3, torch.float32)
    if device:
        model, data = model.cuda(), on_device(data)
    optimizer = sharded(model, partial(torch.optim.SGD, **SGD), **form)
    train(model, optimizer, data)
    optimizer.finish()
    return model, optimizer


def the_default_process_group_has_a_backend_for_the_device_alone():
    assert dist.get_backend_config() == f"cuda:{BACKEND}"
    assert dist.get_backend() != BACKEND  # so that it must not be asked for by this name
    assert backend_of(dist.group.WORLD, DEVICE) == BACKEND
    assert runs_on_device(dist.group.WORLD, DEVICE)
    both = dist.new_group(backend=f"cpu:gloo,cuda:{BACKEND}")
    assert runs_on_device(both, DEVICE)
    assert not runs_on_device(both, torch.device("cpu"))
    assert not runs_on_device(dist.new_group(backend="gloo"), DEVICE)
    raises(partial(sharded, mlp(), partial(torch.optim.SGD, **SGD)), "cannot carry tensors that are on 'cpu'")


def whatever_reaches_the_backend_is_on_the_device():
    """Tensors that reach the backend are on the device, and training equals that of the host with gloo, bit for bit."""
    gloo = dist.new_group(backend="gloo")
    for name, form in FORMS.items():
        with Device(), Wire() as wire:
            model, optimizer = trained(form, device=True)
            assert all(isinstance(p.grad, type(None)) for p in model.parameters())
            found = {key: value.cpu() for key, value in model.state_dict().items()}
        assert sum(wire.carried.values()) > 15, (name, wire.carried)
        reference, on_host = trained({**form, "group": gloo})
        assert all(isinstance(bucket.flat, OnDevice) for bucket in optimizer.buckets)
        assert optimizer.sent == on_host.sent, name
        for key, value in reference.state_dict().items():
            assert type(found[key]) is torch.Tensor
            assert torch.equal(found[key], value), (name, key)


def nodes_of_several_devices_are_served_too():
    one_node = (1, dist.get_world_size())
    hosts = init_device_mesh("cpu", one_node, backend_override={0: "gloo", 1: "gloo"})
    reference, _ = trained({"mesh": hosts})
    mesh = init_device_mesh("cpu", one_node, backend_override={0: f"cuda:{BACKEND}", 1: f"cuda:{BACKEND}"})
    for axis in range(mesh.ndim):
        carry_by_gloo(mesh.get_group(axis))
    with Device(), Wire():
        model, _ = trained({"mesh": mesh}, device=True)
        found = {key: value.cpu() for key, value in model.state_dict().items()}
    for key, value in reference.state_dict().items():
        assert torch.equal(found[key], value), key


def the_host_waits_for_the_device_twice_a_bucket_whatever_the_number_of_owners():
    with Device() as device:
        model = mlp(torch.float32).cuda()
        push = Push(threshold=5e-3, encoding="coo")
        optimizer = sharded(model, partial(torch.optim.SGD, **SGD), push=push)
        inputs, targets = own(*next(on_device(batches(1, torch.float32))))
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        device.waits.clear()
        loss.backward()
        assert 0 < device.waits.total() <= 2 * len(optimizer.buckets), device.waits
        optimizer.step()

        publish = Publish(threshold=1e-9, encoding="coo")  # each bucket's entries are counted once; the counts are read
        optimizer = sharded(model, partial(torch.optim.SGD, **SGD), publish=publish)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        device.waits.clear()
        optimizer.step()
        assert 0 < device.waits.total() <= len(optimizer.buckets) + 1, device.waits


def what_is_published_beside_the_compute_is_no_time_of_it_but_its_wait_is():
    """Its spans began after the forward's, in another stream, and counted as exposed though the forward went on."""
    seen = []

    @contextmanager
    def observe(label, phase, *, group=None):
        seen.append((re.sub(r" \d+", "", label), phase))
        yield

    with Device():
        for publish in (Publish(), PUBLISH):
            model = mlp(torch.float32).cuda()
            seen.clear()
            form = {"publish": publish, "publish_overlaps": True, "observe": observe}
            optimizer = sharded(model, partial(torch.optim.SGD, **SGD), **form)
            train(model, optimizer, on_device(batches(2, torch.float32)))
            optimizer.finish()
            published = {each for each in seen if "publish" in each[0]} - {
                ("threshold publish bucket", "compression"),
                ("counts publish", "exposed_communication"),
            }
            assert published == {("wait publish bucket", "exposed_communication")}


def a_stream_is_of_its_tensors_device_and_whoever_goes_on_waits_for_it():
    """It was of the current device: nothing ran beside, or, where that had changed, before what it was to wait for.

    A forward in a stream of its own begins what the end of its backward, in the caller's stream, takes.
    """
    made, waiting = [], []

    class Named(Stream):
        def __init__(self, device):
            made.append(device)
            self.device = device

        def wait_event(self, _event):
            waiting.append(self)

    forward, caller = Stream.__new__(Named), Stream.__new__(Named)
    forward.device = caller.device = DEVICE
    before = torch.cuda.Stream, torch.cuda.current_stream
    try:
        torch.cuda.Stream, torch.cuda.current_stream = Named, lambda device: forward if device == DEVICE else None
        wait = SideStream(DEVICE).begin(lambda: None)
        torch.cuda.current_stream = lambda device: caller if device == DEVICE else None
        wait()
        assert waiting == [forward, caller]
        torch.cuda.current_stream = lambda device: forward
        with Device():
            optimizer = sharded(mlp(torch.float32).cuda(), partial(torch.optim.SGD, **SGD), publish_overlaps=True)
            optimizer.step()
            optimizer.finish()
    finally:
        torch.cuda.Stream, torch.cuda.current_stream = before
    assert len(made) >= 2
    assert set(made) == {DEVICE}, made


def a_message_is_kept_until_the_stream_that_sends_it_is_waited_for():
    """The message was packed on the compute stream; before that wait, its memory must not be reused."""
    packed, alive = [], []

    class Watched(Stream):
        def wait_event(self, _event):
            alive.extend(each() is not None for each in packed)
            packed.clear()

    pack = Encoding.pack

    def noted(*arguments, **options):
        message, entries = pack(*arguments, **options)
        packed.append(weakref.ref(message))
        return message, entries

    with Device():
        model = mlp(torch.float32).cuda()
        form = {"first_bucket_bytes": 1e9, "publish_overlaps": True, "publish": Publish(threshold=1e-9, encoding="coo")}
        optimizer = sharded(model, partial(torch.optim.SGD, **SGD), **form)
        Encoding.pack, torch.cuda.current_stream = noted, lambda *_device: Watched()
        try:
            train(model, optimizer, on_device(batches(2, torch.float32)))
            assert packed, "nothing was packed"
            optimizer.finish()
        finally:
            Encoding.pack, torch.cuda.current_stream = pack, lambda *_device: Stream()
    assert alive, "nothing was waited for"
    assert all(alive), alive


def a_push_is_not_taken_for_parameters_where_messages_have_no_tags():
    """The first rank pushes twice: its messages have nothing to meet, in whatever order they come."""
    with Device():
        model = mlp(torch.float32).cuda()
        group = dist.new_group(backend=f"cuda:{BACKEND}", timeout=SOON)
        optimizer = sharded(model, partial(torch.optim.SGD, lr=0.01), shard_shares=None, group=group)
        before = [p.detach().clone() for p in model.parameters()]
        inputs, targets = own(*next(on_device(batches(1, torch.float32))))

    def turn():
        for _ in range(1 + (dist.get_rank() == 0)):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def check():
        with Device():
            raises(turn, "equally many backwards outside no_sync")
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert float((parameter.detach() - old).abs().max()) < 0.02, "a gradient was taken for parameters"

    return [check]


def the_loop_of_the_readme_runs():
    (text,) = re.findall(r"```python run\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    changes = {
        "Linear(1024, 10))": "Linear(1024, 10)).cuda()",
        "generator=random)": "generator=random).cuda()",
        "dist.init_process_group()": "",  # it is there, as it would be
        "dist.destroy_process_group()": "",
        "range(100)": "range(40)",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with Device(), Wire() as wire:
        namespace = {}
        exec(compile(text, "README.md", "exec"), namespace)
    assert wire.carried.total() > 150
    optimizer, loss = namespace["optimizer"], float(namespace["loss"])
    assert 0 < optimizer.sent.entries < optimizer.sent.offered
    assert optimizer.sent.bytes == sum(optimizer.sent.by_bucket) > 0
    assert loss < 0.8 * float(torch.tensor(10.0).log())


CHECKS = {
    check.__name__: check
    for check in (
        # these two replace streams, which nothing that waits in a thread may find replaced
        a_message_is_kept_until_the_stream_that_sends_it_is_waited_for,
        a_stream_is_of_its_tensors_device_and_whoever_goes_on_waits_for_it,
        a_push_is_not_taken_for_parameters_where_messages_have_no_tags,
        the_default_process_group_has_a_backend_for_the_device_alone,
        whatever_reaches_the_backend_is_on_the_device,
        nodes_of_several_devices_are_served_too,
        the_host_waits_for_the_device_twice_a_bucket_whatever_the_number_of_owners,
        what_is_published_beside_the_compute_is_no_time_of_it_but_its_wait_is,
        the_loop_of_the_readme_runs,
    )
}


def start():
    dist.init_process_group(timeout=timedelta(seconds=60))


def main(*arguments):
    """Run the checks that are named, or all; write what they showed to the file that comes last."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with a_machine_with_gpus():
        start()
        report(CHECKS, *arguments)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])

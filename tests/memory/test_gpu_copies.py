"""The same bytes by way of a GPU: its kernels read and write pinned host memory, beside a compute stream."""

import random

import pytest
import torch
from pages import NAMESPACE, a_pool, in_record, noise, raw

from kvarve.memory._kernel_copies import by_kernel
from kvarve.memory.arenas import DeviceArena, HostArena
from kvarve.memory.page_copies import ByGather, DeviceCopies, Way

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SLOTS, BUSY = 9, 50_000_000  # cycles of a kernel, so that a copy that does not wait comes first


@pytest.mark.parametrize("mover", [ByGather, by_kernel])
def test_pages_written_on_a_stream_of_their_own_come_back_before_it_reads_them(mover: Way) -> None:
    pool, rng, cuda = a_pool("bfloat16", "float32", "uint8"), random.Random(3), torch.device("cuda")
    device, host = DeviceArena(pool, SLOTS, cuda), HostArena(pool, SLOTS, NAMESPACE, device=cuda)
    copies, compute = DeviceCopies([device], [host], mover), torch.cuda.Stream()
    keys = [bytes([slot]) * 32 for slot in range(SLOTS)]
    there, home = rng.sample(range(SLOTS), SLOTS), rng.sample(range(SLOTS), SLOTS)
    wanted = {  # there before the stream is busy, as a copy from the host would wait for it
        (number, slot): noise(buffer, 100 * number + slot).cuda()
        for number, buffer in enumerate(pool.buffers)
        for slot in range(SLOTS)
    }
    found = dict[str, torch.Tensor]()

    def read(layer: int, event: torch.cuda.Event) -> None:
        """What the compute stream reads of a layer, sent before it has come: each but the first comes late."""
        with torch.cuda.stream(compute):
            copies.order(event)
            found.update(
                (buffer.name, device.buffers[buffer.name].clone()) for buffer in pool.buffers if buffer.layer == layer
            )
        torch.cuda._sleep(BUSY // 10)

    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(BUSY)
        for number, buffer in enumerate(pool.buffers):
            for slot in range(SLOTS):
                device.buffers[buffer.name][slot] = wanted[number, slot]
        copies.save({0: ([*enumerate(there)], keys)}, copies.ready())
        for slot, at in enumerate(there):
            assert host.intact(at, keys[slot])
            expected = [raw(noise(buffer, 100 * number + slot)).tobytes() for number, buffer in enumerate(pool.buffers)]
            assert in_record(host, at) == expected
        torch.cuda._sleep(BUSY)
        for tensor in device.buffers.values():
            tensor.zero_()  # a load waits for it: the slots were in use
        copies.load({0: [*zip(there, home, strict=True)]}, copies.ready(), read)
        found = {name: tensor.cpu() for name, tensor in found.items()}
    for number, buffer in enumerate(pool.buffers):
        for slot, at in enumerate(home):
            assert raw(found[buffer.name][at]).tobytes() == raw(noise(buffer, 100 * number + slot)).tobytes()
    host.close()

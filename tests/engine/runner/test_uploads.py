"""What is sent to a device is what was given, however many steps are in flight behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from termgen.engine.runner.uploads import ALIGNMENT, NUM_SLOTS, Uploads
from termgen.engine.step import MAX_STEPS_IN_FLIGHT

SEED = 3


def test_on_a_cpu_nothing_is_copied() -> None:
    values = np.arange(5)
    uploads = Uploads(torch.device("cpu"))
    assert uploads.pinned(values).data_ptr() == values.ctypes.data
    assert uploads.to_device(values).tolist() == [0, 1, 2, 3, 4]


def test_a_slot_is_not_used_again_before_its_step_has_landed() -> None:
    assert NUM_SLOTS > MAX_STEPS_IN_FLIGHT


@pytest.mark.gpu
def test_values_of_queued_steps_arrive_as_they_were_given() -> None:
    """With as many steps queued as ever are, of arrays of all sizes; some fit into no slot."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    uploads = Uploads(torch.device("cuda"), bytes_per_step=4096)
    torch.cuda.synchronize()
    for _ in range(4):
        torch.cuda._sleep(40_000_000)  # about 20 ms, behind which everything waits
        sent: list[tuple[np.ndarray, torch.Tensor]] = []
        for _ in range(MAX_STEPS_IN_FLIGHT):
            uploads.next_step()
            for dtype in (np.int64, np.float32, np.uint8, np.int32):
                shape = rng.integers(1, 40, size=2)
                values = rng.integers(0, 200, size=shape).astype(dtype)
                sent.append((values.copy(), uploads.to_device(values)))
                values[:] = 0  # whoever gave it may use it again
        for given, tensor in sent:
            assert np.array_equal(given, tensor.cpu().numpy())


@pytest.mark.gpu
def test_memory_is_locked_only_for_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads(torch.device("cuda"), bytes_per_step=2 * ALIGNMENT)
    locked: list[int] = []
    pin = torch.Tensor.pin_memory
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: (locked.append(tensor.nbytes), pin(tensor))[1]
    )
    for _ in range(3 * NUM_SLOTS):
        uploads.next_step()
        pages = [uploads.pinned(np.ones(n, np.uint8)) for n in (1, ALIGNMENT)]
        assert all(page.is_pinned() for page in pages)
    assert not locked
    assert uploads.pinned(np.ones(1, np.uint8)).is_pinned()
    assert locked == [1]

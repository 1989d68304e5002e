import errno
import logging
import os
import threading

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hookline.engine.checkpoint import files as module
from hookline.engine.checkpoint.files import CheckpointError, Saver


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER", 0.0)


class Disk:
    """Fails ``failures`` times, then works; waits for ``gate`` if it is given."""

    def __init__(self, failures=0, error=None, gate=None):
        self.failures, self.error, self.gate = failures, error or OSError(errno.ENOSPC, "No space left"), gate
        self.calls, self.threads = 0, []

    def __call__(self):
        if self.gate is not None:
            assert self.gate.wait(20)
        self.calls += 1
        self.threads.append(threading.current_thread())
        if self.calls <= self.failures:
            raise self.error


def write_and_wait(saver, disk):
    saver.write("a.pth", disk)
    saver.wait()


def errors(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_synchronous_write_is_complete_and_reported_on_return():
    saver, disk, reported = Saver(), Disk(), []
    saver.write("a.pth", disk, reported.append)
    assert (disk.calls, reported, saver.pending) == (1, [None], None)
    assert disk.threads == [threading.current_thread()]


def test_an_asynchronous_write_is_reported_on_the_calling_thread():
    gate, reported = threading.Event(), []
    saver, disk = Saver(asynchronous=True), Disk(gate=gate)
    saver.write("a.pth", disk, lambda error: reported.append((error, threading.current_thread())))
    saver.poll()
    assert reported == []
    gate.set()
    saver.pending[0].exception()
    assert reported == []
    saver.poll()
    assert reported == [(None, threading.current_thread())]
    assert disk.threads != [threading.current_thread()]
    saver.poll()
    saver.wait()
    assert len(reported) == 1


def test_only_one_write_runs_at_a_time():
    order = []
    saver = Saver(asynchronous=True)
    for name in "abc":
        saver.write(name, lambda name=name: order.append(f"write {name}"), lambda e, name=name: order.append(name))
    saver.wait()
    assert order == ["write a", "a", "write b", "b", "write c", "c"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_that_fails_once_is_retried(caplog, asynchronous):
    saver, disk, reported = Saver(asynchronous), Disk(failures=1), []
    saver.write("a.pth", disk, reported.append)
    saver.wait()
    assert (disk.calls, reported) == (2, [None])
    (message,) = errors(caplog, logging.WARNING)
    assert "Retrying once: cannot save a.pth: No space left; make room" in message


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_write_that_fails_twice_stops_the_run_or_is_logged(caplog, asynchronous, on_error):
    saver, disk, reported = Saver(asynchronous, on_error), Disk(failures=2), []

    def save():
        saver.write("a.pth", disk, reported.append)
        saver.wait()

    if on_error == "stop":
        with pytest.raises(CheckpointError, match=r"cannot save a\.pth: No space left; make room there"):
            save()
        assert errors(caplog, logging.ERROR) == []
    else:
        save()
        (message,) = errors(caplog, logging.ERROR)
        assert "Training continues" in message
        assert "cannot save a.pth: No space left" in message
    assert disk.calls == 2
    assert isinstance(reported[0], CheckpointError)
    assert reported[0].errno == errno.ENOSPC
    saver.write("b.pth", disk, reported.append)  # and the next save is a new one
    saver.wait()
    assert reported[1:] == [None]


def test_a_failed_write_is_reported_before_the_next_starts():
    saver, disk, reported = Saver(asynchronous=True), Disk(failures=2), []
    saver.write("a.pth", disk, reported.append)
    with pytest.raises(CheckpointError, match=r"a\.pth"):
        saver.write("b.pth", disk, reported.append)
    assert disk.calls == 2
    assert saver.pending is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_errors_are_raised_with_any_on_error(asynchronous):
    saver, disk = Saver(asynchronous, "continue"), Disk(failures=9, error=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        write_and_wait(saver, disk)
    assert disk.calls == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "allow writing there"),
        (errno.EFBIG, "ulimit"),
        (errno.ENOENT, "its folder was removed"),
        (errno.EIO, "see to the disk"),
    ],
)
def test_errors_say_what_to_do(number, advice):
    message = str(CheckpointError.of("run/a.pth", OSError(number, "Cause")))
    assert message.startswith("cannot save run/a.pth: Cause; ")
    assert advice in message
    assert str(CheckpointError.of("a.pth", OSError("odd"))).startswith("cannot save a.pth: odd; ")


# ---------------------------------------------------------------------------- copies


def tensors_in(data):
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def address(tensor):
    return tensor.data_ptr() if tensor.layout is torch.strided else None


def state(seed=0, width=5):
    torch.manual_seed(seed)
    weight = torch.randn(width, 7)
    return {
        "weight": weight,
        "tied": weight.detach(),
        "part": weight[1:, ::2],
        "steps": [torch.tensor(3.0), torch.arange(3, dtype=torch.int16), torch.empty(0, 4)],
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "sparse": torch.eye(3).to_sparse(),
        "lr": 0.1,
    }


def same(a, b):
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return a["lr"] == b["lr"] and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.to_dense(), y.to_dense()) for x, y in pairs
    )


def test_a_copy_does_not_change_with_the_state():
    saver, data = Saver(asynchronous=True), state()
    copy = saver.keep(data)
    assert same(copy, data)
    for tensor in tensors_in(data):
        tensor.zero_()
    assert same(copy, state())


def test_tied_tensors_are_copied_once():
    copy = Saver(asynchronous=True).keep(state())
    assert copy["weight"] is copy["tied"]


def test_the_next_copy_reuses_the_memory():
    saver = Saver(asynchronous=True)
    first = saver.keep(state(0))
    addresses = [address(tensor) for tensor in tensors_in(first)]
    second = saver.keep(state(1))
    assert [address(tensor) for tensor in tensors_in(second)] == addresses
    assert same(second, state(1))


@pytest.mark.parametrize("width", [2, 500])
def test_a_state_of_another_size_is_copied(width):
    saver = Saver(asynchronous=True)
    saver.keep(state(0, 50))
    assert same(saver.keep(state(1, width)), state(1, width))


def test_a_state_without_tensors_is_copied():
    assert Saver(asynchronous=True).keep({"iteration": 3}) == {"iteration": 3}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_free_releases_the_memory():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    data = {"weight": torch.ones(25_000_000)}
    saver, before = Saver(asynchronous=True), resident()
    copy = saver.keep(data)
    assert 90e6 < resident() - before < 120e6
    saver.keep(data)
    assert resident() - before < 120e6
    del copy
    saver.close()
    assert resident() - before < 20e6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_holds_the_state_at_the_call():
    saver, weight = Saver(asynchronous=True), torch.zeros(50_000_000, device="cuda")
    for value in (1.0, 2.0):
        weight.fill_(value)
        copy = saver.keep({"weight": weight})
        weight.fill_(-1.0)  # queued behind the copy
        saver.write("a.pth", lambda: None)
        saver.wait()
        assert copy["weight"].is_pinned()
        assert torch.equal(copy["weight"], torch.full((50_000_000,), value))
    del copy
    saver.close()

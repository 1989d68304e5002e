"""Tests that need a GPU."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.data.stream import SplitLoader
from hookline.engine.modeling import build_model
from hookline.hooks import CallbackHook, PeriodicCheckpointer

from .step.test_nonfinite import BAD_GRADIENT, BAD_LOSS, GOOD, Net
from .step.test_nonfinite import data as batches_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def cfg(tmp_path):
    cfg = get_cfg()
    cfg.MODEL.NAME = "ConvNet"
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.merge_from_list(["MODEL.ARGS.num_classes", 4])
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 2048, "shape": [1, 8, 8]}},)
    cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
    cfg.SOLVER.MAX_ITER = 300
    cfg.LOG.PERIOD = 200
    cfg.OUTPUT_DIR = str(tmp_path)
    return cfg


def train_without_waiting(trainer, first, last):
    """Train; an error is raised if one of the steps from ``first`` to ``last`` waits for the GPU."""

    def watch(trainer):
        if trainer.iter in (first, last + 1):
            torch.cuda.set_sync_debug_mode("error" if trainer.iter == first else "default")

    trainer.register_hooks([CallbackHook(before_step=watch)])
    try:
        assert trainer.train().reason == "completed"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        (0, {}),
        (2, {"SOLVER.AMP.ENABLED": True, "SOLVER.AMP.DTYPE": "bfloat16"}),
        (0, {"SOLVER.AMP.ENABLED": True, "SOLVER.AMP.DTYPE": "float16"}),
    ],
)
def test_no_step_between_two_writings_waits_for_the_device(cfg, workers, changes):
    cfg.merge_from_list(["DATALOADER.NUM_WORKERS", workers, *(part for pair in changes.items() for part in pair)])
    train_without_waiting(DefaultTrainer(cfg), first=50, last=149)


@pytest.mark.parametrize("bad", [BAD_LOSS, BAD_GRADIENT])
def test_updates_that_are_not_finite_are_skipped_on_the_device_and_counted(bad):
    net = Net().cuda()
    data = [batch.cuda() for batch in batches_of(GOOD, GOOD, GOOD, GOOD, bad, GOOD)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    made = SimpleTrainer(net, data, optimizer, nonfinite="skip", device="cuda")
    made.train(0, 12)
    assert made.nonfinite.steps == 2
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_a_late_nonfinite_flag_is_an_error_before_a_save(tmp_path, fused):
    net = Net().cuda()
    data = [batch.cuda() for batch in batches_of(GOOD, GOOD, BAD_GRADIENT, GOOD)]
    made = SimpleTrainer(net, data, torch.optim.SGD(net.parameters(), lr=0.01, fused=fused), device="cuda")
    made.register_hooks([PeriodicCheckpointer(Checkpointer(net, str(tmp_path), trainer=made), period=1)])
    with pytest.raises(FloatingPointError, match="iteration 2"):
        made.train(0, 4)
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["model_0000000.pth", "model_0000001.pth"]


def traced(trainer, path):
    """The kernels, and the copies to the GPU of 100 kB or more, of iterations 30 to 39."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    )

    def watch(trainer):
        if trainer.iter == 30:
            profiler.start()
        if trainer.iter == 40:
            torch.cuda.synchronize()
            profiler.stop()

    trainer.register_hooks([CallbackHook(before_step=watch)])
    SimpleTrainer.train(trainer, 0, 45)
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    return [e for e in events if e.get("cat") == "kernel"], [e for e in copies if e["args"].get("bytes", 1e9) >= 1e5]


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_come_from_pinned_memory_and_with_workers_have_a_stream_of_their_own(cfg, tmp_path, workers):
    cfg.merge_from_list(["MODEL.ARGS.in_channels", 3, "MODEL.ARGS.width", 128, "DATALOADER.NUM_WORKERS", workers])
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 4096, "shape": [3, 32, 32]}},)
    cfg.DATALOADER.BATCH_SIZE = 256
    kernels, copies = traced(DefaultTrainer(cfg), tmp_path / "trace.json")
    if not copies:
        pytest.skip("the profiler sees no copies; it may need permissions (CUPTI)")
    assert all("Pinned" in copy["name"] for copy in copies)
    if workers:
        streams = {kernel["args"]["stream"] for kernel in kernels}
        assert not any(copy["args"]["stream"] in streams for copy in copies)


def train_and_die(cfg):
    trainer = DefaultTrainer(cfg)
    kill = lambda trainer: trainer.iter == 23 and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    trainer.register_hooks([CallbackHook(before_step=kill)])
    trainer.train()


def test_a_killed_run_with_float16_dropout_and_workers_resumes_to_the_same_bits(cfg, tmp_path):
    cfg.merge_from_list(["MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 64, "num_classes": 4, "dropout": 0.2}])
    cfg.merge_from_list(["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "float16", "DATALOADER.NUM_WORKERS", 2])
    cfg.merge_from_list(["SOLVER.MAX_ITER", 40, "SOLVER.CHECKPOINT_PERIOD", 5, "LOG.PERIOD", 7, "SEED", 0])
    killed = cfg.clone()
    cfg.OUTPUT_DIR, killed.OUTPUT_DIR = str(tmp_path / "straight"), str(tmp_path / "killed")
    straight = DefaultTrainer(cfg)
    straight.train()
    process = multiprocessing.get_context("spawn").Process(target=train_and_die, args=(killed,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = DefaultTrainer(killed)
    resumed.resume_or_load(resume=True)
    assert 0 < resumed.start_iter <= 23
    resumed.train()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert resumed.grad_scaler.state_dict() == straight.grad_scaler.state_dict()


def test_a_stream_that_draws_on_the_device_draws_other_numbers_for_each_batch():
    class Noise(IterableDataset):
        shares_itself_out = True

        def __iter__(self):
            while True:
                yield torch.randn(2, device="cuda")

    batches = iter(SplitLoader(Noise(), 1, seed=0))
    assert not torch.equal(next(batches), next(batches))


def test_an_asynchronous_save_has_the_weights_of_its_step(tmp_path):
    model = torch.nn.Linear(100_000_000, 1, bias=False, device="cuda")
    checkpointer = Checkpointer(model, str(tmp_path), asynchronous=True)
    for _ in range(3):  # the first one allocates, later ones use the memory again
        before = model.weight.detach().clone()
        checkpointer.save("state")
        with torch.no_grad():
            model.weight.add_(1.0)
        checkpointer.wait()
        saved = torch.load(Path(tmp_path, "state.pth"), weights_only=True)["model"]["weight"]
        assert torch.equal(saved.cuda(), before)
    checkpointer.wait()


def peak(act):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    return torch.cuda.max_memory_allocated() - before


def test_a_default_run_needs_at_most_8_MB_more_than_the_loop_by_hand(cfg):
    def by_hand():
        model = build_model(cfg).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        size = cfg.DATALOADER.BATCH_SIZE
        for _ in range(10):
            x, y = torch.randn(size, 1, 8, 8, device="cuda"), torch.zeros(size, dtype=torch.int64, device="cuda")
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    peak(by_hand)  # allocates what libraries keep
    assert peak(lambda: SimpleTrainer.train(DefaultTrainer(cfg), 0, 30)) - peak(by_hand) <= 8e6

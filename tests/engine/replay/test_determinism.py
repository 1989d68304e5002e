"""``determinism``: two runs of a config are compared, and what differs first is named, with what to do."""

import random
import time

import pytest
import torch
from small_runs import SMALL_IMAGES
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from hookline.cli import main
from hookline.config import ConfigError, get_cfg
from hookline.engine.replay import determinism
from hookline.engine.replay.parting import Difference, first_difference, first_operation
from hookline.engine.replay.trace import NO_VERSION, Entry, Trace, trace_steps


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class Clock(nn.Module):
    def forward(self, x):
        return x * (1 + time.perf_counter_ns() % 100_003)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.rand(gradient.shape, generator=OTHER)


OTHER = torch.Generator()
OTHER.seed()


class RandomGradient(nn.Module):
    def forward(self, x):
        return NoisyBackward.apply(x)


class OrderOfASet(nn.Module):
    def forward(self, x):
        return x * sum(i * int(one) for i, one in enumerate({str(number) for number in range(50)}))


class Put(nn.Module):
    """Equal in all runs, though torch does not promise it."""

    def forward(self, x):
        return x + torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))


class Net(nn.Module):
    def __init__(self, middle="Identity"):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(16, 4), nn.Linear(4, 4), nn.Dropout(0.3)
        self.middle = nn.Identity() if middle == "Identity" else globals()[middle]()

    def forward(self, x):
        return self.second(self.drop(self.middle(self.first(x.flatten(1)))))


class Odd(Dataset):
    """Every fifth sample has other values in each run; or all depend on the worker."""

    def __init__(self, by_worker=False):
        self.by_worker = by_worker

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.by_worker:
            extra = get_worker_info().id if get_worker_info() else 0
        else:
            extra = random.SystemRandom().random() if index % 5 == 0 else 0
        return torch.rand(16) + extra, index % 4


class Declared(Odd):
    deterministic = True


@pytest.fixture
def report(monkeypatch, tmp_path_factory):
    """A function that returns the report on a run. All runs are in this process, which saves the starts of others."""

    def trace(self, steps=0, operations=False, keys=(), variables=()):
        cfg = self._cfg.clone()
        cfg.merge_from_list([*keys, "OUTPUT_DIR", str(tmp_path_factory.mktemp("run"))])
        return trace_steps(self._trainer, cfg, steps or self._steps, operations)

    monkeypatch.setattr(determinism._Runs, "trace", trace)

    def make(middle="Identity", *overrides, steps=2):
        deterministic, lines = determinism.determinism_of(config(middle, *overrides), steps)
        return deterministic, "\n".join(lines)

    yield make
    torch.use_deterministic_algorithms(False)


def config(middle="Identity", *overrides):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", f"{__name__}:Net", "MODEL.ARGS", {"middle": middle}, "MODEL.DEVICE", "cpu"),
            *("MODEL.LOSS.NAME", "CrossEntropyLoss", "DATALOADER.BATCH_SIZE", 8, "SOLVER.MAX_ITER", 20, "SEED", 3),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "num_classes": 4}}], *overrides),
        ]
    )
    return cfg


def test_a_deterministic_run_is_told_so_and_nothing_is_written(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deterministic, text = report("Identity", "SEED", -1, "PARALLEL.NAME", "mesh", steps=3)
    assert deterministic
    assert "SEED is not set: all runs use" in text
    assert "PARALLEL.NAME is mesh: checked on one rank" in text
    assert "3 steps on the CPU" in text
    assert "two runs: equal to the bit" in text
    assert "with 2 workers: equal to the bit" in text
    assert "without a deterministic version: none" in text
    assert not list(tmp_path.iterdir())


def test_operations_without_a_deterministic_version_are_named(report):
    deterministic, text = report("Put", steps=1)
    assert deterministic
    assert "without a deterministic version: put_ (may differ in longer runs" in text


@pytest.mark.parametrize(
    ("middle", "what", "where", "how"),
    [
        ("Noise", "the output of middle (Noise)", "aten.randn.generator in middle:", "call manual_seed()"),
        ("Clock", "the output of middle (Clock)", "aten.mul.Tensor in middle:", "the time"),
        ("RandomGradient", "the gradient of first.", "in middle (backward pass):", "call manual_seed()"),
    ],
)
def test_the_first_module_and_operation_are_named(report, middle, what, where, how):
    deterministic, text = report(middle)
    assert not deterministic
    assert f"Not deterministic: two runs with equal settings differ in step 0: {what}" in text
    assert where in text
    assert how in text.splitlines()[-1]


def test_samples_that_differ_are_named(report):
    deterministic, text = report("Identity", "DATASETS.TRAIN", [f"{__name__}:Odd"], "DATALOADER.BATCH_SIZE", 40)
    assert not deterministic
    assert "two runs with equal settings differ in step 0: the batch." in text
    indices = text.split("samples of Odd that differ, by their indices: ")[1].splitlines()[0]
    assert set(indices.split(", ")) == {"0", "5", "10", "15", "20", "25", "30", "35"}
    assert "random.SystemRandom" in text


@pytest.mark.parametrize(("name", "advice"), [("Odd", "get_worker_info()"), ("Declared", "deterministic = True")])
def test_samples_that_depend_on_the_worker_are_named(report, name, advice):
    data = [{"NAME": f"{__name__}:{name}", "ARGS": {"by_worker": True}}]
    deterministic, text = report("Identity", "DATASETS.TRAIN", data, "DATALOADER.NUM_WORKERS", 0)
    assert not deterministic
    assert "two runs: equal to the bit" in text
    assert "runs with 0 and 2 workers differ in step " in text
    assert advice in text.splitlines()[-1]


@pytest.mark.parametrize("case", ["found", "rare", "no version"])
def test_settings_that_make_runs_equal_are_found(monkeypatch, case):
    """Runs in processes of their own, of which only their settings count here."""
    runs, tried = determinism._Runs(config(), 1, None), []

    def trace(steps=0, operations=False, keys=(), variables=()):
        tried.append(keys)
        equal = True in keys or case == "rare"
        entry = Entry("output", "middle (Middle)", (0 if equal else len(tried),))
        error = f"RuntimeError: scatter{NO_VERSION}" if True in keys and case == "no version" else ""
        return Trace([[], [] if operations else [entry]], FACTS, error, ("scatter",) if "warn" in keys else ())

    monkeypatch.setattr(runs, "trace", trace)
    before = (Trace([[], [Entry("output", "middle (Middle)", (number,))]], FACTS) for number in (-1, 0))
    text = "\n".join(runs.explain(Difference(0, "output", "middle (Middle)"), *before))
    assert ("a third run equals the second" in text) == (case == "rare")
    assert ("what to set: DETERMINISTIC: True" in text) == (case == "found")
    assert ("operations without a deterministic version: scatter" in text) == (case == "no version")
    assert ("tried, and not enough: PYTHONHASHSEED=0, DETERMINISTIC True, one thread" in text) == (case == "no version")


FACTS = {"device": "the CPU", "dataset": "Odd", "declared": False, "splits_itself": False, "workers": 0}


def operation(name, digests, inputs=(), random=False):
    return Entry("operation", name, digests, inputs, random)


@pytest.mark.parametrize(
    ("ours", "theirs", "how"),
    [
        (
            operation("aten.scatter_add.default in a", (1,), (0,)),
            operation("aten.scatter_add.default", (2,), (0,)),
            "itself",
        ),
        (operation("aten.randn.default", (1,), (), True), operation("aten.randn.default", (2,), (), True), "draws"),
        (operation("aten.add.Tensor", (1,), (3,)), operation("aten.add.Tensor", (2,), (4,)), "outside"),
        (operation("aten.sin.default", (1,)), operation("aten.cos.default", (1,)), "path"),
        (operation("aten.view.default", (5,), (7,)), operation("aten.view.default", (6,), (8,)), None),
    ],
)
def test_memory_without_content_is_no_difference(ours, theirs, how):
    empty = [operation("aten.empty.memory_format", (7,)), operation("aten.empty.memory_format", (8,))]
    origin = first_operation(Trace([[], [empty[0], ours]], {}), Trace([[], [empty[1], theirs]], {}))
    assert (origin and origin.how) == how


def test_runs_that_do_different_things_or_fail_differ():
    one, other = Entry("output", "a (A)", (1,)), Entry("output", "b (B)", (1,))
    plain = Trace([[], [one]], {})
    assert first_difference(plain, plain) is None
    assert first_difference(plain, Trace([[], [other]], {})) == Difference(0, "order", "output a (A), and output b (B)")
    assert first_difference(plain, Trace([[], [one, other]], {})) == Difference(0, "order", "nothing, and output b (B)")
    assert first_difference(plain, Trace([[], [one]], {}, "ValueError")) == Difference(0, "error", "ValueError")
    assert first_difference(plain, Trace([[]], {})) == Difference(0, "length", "")


def test_a_run_that_fails_is_an_error(report):
    with pytest.raises(ConfigError, match="the run fails after 0 steps, which are equal in two runs: IndexError"):
        report("Identity", "MODEL.LOSS.NAME", f"{__name__}:failing")


def failing(outputs, targets):
    raise IndexError("no such thing")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps"),
        ([], "MODEL.NAME: is not set"),
        (["--trainer", "json:JSONDecoder"], "--trainer"),
        (["--config-file", "digits/mlp.yaml", "DETERMINISTIC", "True", "CUDNN_BENCHMARK", "True"], "contradict"),
    ],
)
def test_bad_input_ends_with_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["determinism", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_finds_the_order_of_a_set_in_other_processes(capsys, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    keys = (
        *("MODEL.NAME", f"{__name__}:Net", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss", "SEED", "3"),
        *("DATASETS.TRAIN", str([{"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "num_classes": 4}}])),
    )
    assert main(["determinism", "--steps", "1", *keys, "MODEL.ARGS", "{'middle': 'OrderOfASet'}"]) == 1
    text = capsys.readouterr().out
    assert "differ in step 0: the output of middle (OrderOfASet)" in text
    assert "what to set: the environment variable PYTHONHASHSEED=0" in text

"""Strategies of a third party: ranks that share a batch, ranks whose weights differ."""

import shutil

import pytest
from ranks import SYNTHETIC, finish, fork, rows, run_ranks, tool

pytestmark = pytest.mark.timeout(400)

STRATEGIES = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hookline.engine import comm
from hookline.engine.parallel import Strategy
from hookline.hooks import HookBase

# The last layer is not sharded.
PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}

class TensorParallel(Strategy):
    data_rank, data_size = 0, 1

    def wrap(self, model, device):
        mesh = init_device_mesh(device.type, (comm.get_world_size(),))
        return parallelize_module(model, mesh, PLAN)

class Undeclared(Strategy):
    wrap = TensorParallel.wrap

class Grid(Strategy):
    # FSDP2 over pairs of ranks that share a batch.
    averages = True
    data_rank = property(lambda self: comm.get_rank() // 2)
    data_size = property(lambda self: comm.get_world_size() // 2)

    def wrap(self, model, device):
        mesh = init_device_mesh(device.type, (self.data_size, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], PLAN)
        return fully_shard(model, mesh=mesh["data"])

class LocalSGD(Strategy):
    def before_evaluation(self, model):
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.data)
            parameter.data /= comm.get_world_size()

class DrawnSame(HookBase):
    # Ranks that share a batch draw the same random numbers, for dropout.
    def after_step(self):
        drawn = comm.all_gather(torch.rand(()).item())
        assert len(set(drawn)) == comm.get_data_size(), drawn
"""


def options(*more):
    return [
        *("--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", 3),
        *(
            "MODEL.ARGS.hidden",
            "[32, 16]",
            "DATALOADER.BATCH_SIZE",
            61,
            "LOG.PERIOD",
            5,
        ),  # 61: ranks have unequal parts
        *("SOLVER.MAX_ITER", 30, "SOLVER.CHECKPOINT_PERIOD", 10, "TEST.EVAL_PERIOD", 10),
        *("SOLVER.CLIP_GRADIENTS", "{'ENABLED': True, 'CLIP_TYPE': 'norm', 'CLIP_VALUE': 0.2}", *more),
    ]


def train(folder, ranks, strategy, *more):
    (folder / "strategies.py").write_text(STRATEGIES)
    name = f"strategies:{strategy}" if strategy else "auto"
    return finish(fork(tool(*options("--num-gpus", ranks, "PARALLEL.NAME", name, *more)), folder))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    code, output = train(folder, 1, "")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    code, output = train(folder, 2, "TensorParallel", "HOOKS", "['strategies:DrawnSame']")
    assert code == 0, output
    return folder / "run"


def assert_same(run, other):
    ours, theirs = rows(run), rows(other)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-5, abs=1e-6), our["iteration"]


def test_ranks_that_share_a_batch_train_as_one_rank_does(alone, tensor_parallel):
    assert_same(tensor_parallel, alone)


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "TensorParallel"), (1, "")])
def test_a_checkpoint_of_ranks_that_share_a_batch_is_resumed_on_any_number(
    alone, tensor_parallel, tmp_path, ranks, strategy
):
    shutil.copytree(tensor_parallel, tmp_path / "run")
    (tmp_path / "run/last_checkpoint").write_text("model_0000009.pth")
    code, output = train(tmp_path, ranks, strategy, "--resume")
    assert code == 0, output
    assert "model_0000009.pth" in output
    assert_same(tmp_path / "run", alone)


def test_shards_without_a_word_on_who_shares_a_batch_are_refused(tmp_path):
    code, output = train(tmp_path, 2, "Undeclared")
    assert code == 2, output
    assert "the strategy Undeclared neither averages gradients nor has ranks share a batch" in output
    assert "set its data_rank = 0 and data_size = 1" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_pairs_of_ranks_that_share_a_batch_train_as_one_rank_does(alone, tmp_path):
    code, output = train(tmp_path, 4, "Grid", "HOOKS", "['strategies:DrawnSame']")
    assert code == 0, output
    assert_same(tmp_path / "run", alone)


def test_a_run_whose_weights_differ_by_rank_says_so_and_is_not_resumed(tmp_path):
    code, output = train(tmp_path, 2, "LocalSGD")
    assert code == 0, output
    assert "Strategy LocalSGD: each rank has its own weights" in output
    before = {path: path.read_bytes() for path in tmp_path.glob("run/*.pth")}
    for ranks, strategy in ((2, "LocalSGD"), (1, "")):
        code, output = train(tmp_path, ranks, strategy, "--resume", "SOLVER.MAX_ITER", 40)
        assert code == 2, output
        assert "error: the checkpoint cannot be resumed: its run held other weights" in output
        assert "set MODEL.WEIGHTS instead of resuming" in output
    assert {path: path.read_bytes() for path in tmp_path.glob("run/*.pth")} == before


WEIGHTS = """
from hookline.engine.parallel.base import share_weights

def main(folder):
    rank = comm.get_rank()
    model = nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.LazyLinear(2))
    kinds = [torch.bool, torch.int16, torch.float64, torch.bfloat16, torch.complex64]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.full((3,), 1 - rank, dtype=kind))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    torch.nn.init.constant_(model[0].weight, 1 - rank)
    share_weights(model)
    sums = [model[0].weight.sum().item(), *(abs(model.get_buffer(f"b{n}").sum().item()) for n in range(5))]
    (folder / f"{rank}.json").write_text(json.dumps(sums))
"""


def test_weights_and_buffers_of_any_kind_begin_as_those_of_rank_0(tmp_path):
    code, output, results = run_ranks(WEIGHTS, 2, tmp_path)
    assert code == 0, output
    assert results == [[72, 3, 3, 3, 3, 3]] * 2


SHARED = """
from hookline.engine.data import GlobalBatchSampler, TrainingSampler
from hookline.engine.data.samplers import InferenceSampler
from hookline.engine import SimpleTrainer
from hookline.engine.evaluation import predict_dataset
from hookline.engine.parallel import Strategy
from torch.utils.data import DataLoader

class Shared(Strategy):
    data_rank, data_size = 0, 1

def refused():
    # A loader that was made before the data ranks were set.
    model = nn.Linear(1, 1)
    loader = DataLoader([torch.zeros(1)] * 6, batch_sampler=GlobalBatchSampler(range(6), 4))
    try:
        SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1), strategy=Shared())
    except ConfigError as error:
        return str(error)

def error_of(rank, size):
    try:
        comm.set_data_ranks(rank, size)
    except ConfigError as error:
        return str(error)

def main(folder):
    rank = comm.get_rank()
    before = len(InferenceSampler(5))
    errors = [refused(), error_of(0, 2), error_of(rank, 1 + rank), error_of(1 - rank, 2), error_of(0, 0)]
    comm.set_data_ranks(0, 1)
    one = GlobalBatchSampler(range(6), 4)
    predicted = predict_dataset(nn.Identity(), [torch.arange(3.0)], str(folder))
    shared = [list(one), list(InferenceSampler(5)), next(iter(TrainingSampler(5, shuffle=False))), predicted[1]]
    (folder / f"{rank}.json").write_text(json.dumps([before, errors, shared]))
"""


def test_samplers_and_predictions_follow_the_data_ranks(tmp_path):
    code, output, results = run_ranks(SHARED, 2, tmp_path)
    assert code == 0, output
    for rank, (before, errors, shared) in enumerate(results):
        assert before == (3, 2)[rank]
        assert "splits each batch into 2 parts, and the data_size of the strategy Shared is 1" in errors[0]
        assert "(data_rank, data_size) are [(0, 2), (0, 2)]" in errors[1]
        assert "[(0, 1), (1, 2)]" in errors[2]
        assert "[1, 0] must be numbered in the order of their first ranks" in errors[3]
        assert "[(0, 0), (0, 0)]" in errors[4]
        assert shared == [[[0, 1, 2, 3], [4, 5]], [0, 1, 2, 3, 4], 0, 3]

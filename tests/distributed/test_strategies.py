"""User-defined strategies: what is refused, and ranks with different weights. See also test_own_strategies.py."""

import pytest
from ranks import SYNTHETIC, finish, fork, run_ranks, tool

pytestmark = pytest.mark.timeout(400)


def options(*more):
    return [
        *("--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", "run", "SEED", 3),
        # With 61 samples the shares of two ranks differ.
        *("MODEL.ARGS.hidden", "[32, 16]", "DATALOADER.BATCH_SIZE", 61, "LOG.PERIOD", 5),
        *("SOLVER.MAX_ITER", 30, "SOLVER.CHECKPOINT_PERIOD", 10, "TEST.EVAL_PERIOD", 10),
        *("SOLVER.CLIP_GRADIENTS", "{'ENABLED': True, 'CLIP_TYPE': 'norm', 'CLIP_VALUE': 0.2}", *more),
    ]


def train(folder, ranks, strategy, *more):
    name = f"strategies:{strategy}" if strategy else "auto"
    return finish(fork(tool(*options("--num-gpus", ranks, "PARALLEL.NAME", name, *more)), folder))


def test_a_sharding_strategy_must_declare_which_ranks_share_a_batch(tmp_path):
    code, output = train(tmp_path, 2, "Undeclared")
    assert code == 2, output
    assert "the strategy Undeclared neither averages gradients nor has ranks share a batch" in output
    assert "set its data_rank = 0 and data_size = 1" in output
    assert "Traceback" not in output


def test_a_run_with_different_weights_per_rank_warns_and_cannot_be_resumed(tmp_path):
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


def test_weights_and_buffers_of_any_dtype_start_as_those_of_rank_0(tmp_path):
    code, output, results = run_ranks("shared_batches:weights", 2, tmp_path)
    assert code == 0, output
    assert results == [[72, 3, 3, 3, 3, 3]] * 2


def test_samplers_and_predictions_use_the_data_ranks(tmp_path):
    code, output, results = run_ranks("shared_batches:samplers", 2, tmp_path)
    assert code == 0, output
    for rank, (before, errors, shared) in enumerate(results):
        assert before == (3, 2)[rank]
        assert "splits each batch into 2 parts, and the data_size of the strategy Shared is 1" in errors[0]
        assert "(data_rank, data_size) are [(0, 2), (0, 2)]" in errors[1]
        assert "[(0, 1), (1, 2)]" in errors[2]
        assert (
            "[(1, 2), (0, 2)]; data_size must be the same on all, and each data_rank below it, in the order"
            in errors[3]
        )
        assert "[(0, 0), (0, 0)]" in errors[4]
        assert shared == [[[0, 1, 2, 3], [4, 5]], [0, 1, 2, 3, 4], 0, 3]

"""Models sharded by FSDP2 train like whole models, and resume on any number of ranks."""

import json
import sys

import pytest
import torch
from ranks import HOOKLINE, ROOT, finish, fork, rows, run_ranks, tool

GPT = [
    "--config-file", ROOT / "configs/language/gpt.yaml",
    "MODEL.ARGS.width", 32, "MODEL.ARGS.depth", 2, "MODEL.ARGS.heads", 2, "MODEL.ARGS.block_size", 64,
    "MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", 16, "SOLVER.WARMUP_ITERS", 5, "SOLVER.CHECKPOINT_PERIOD", 10,
    "DATASETS.TRAIN", "['small_text:train']", "DATASETS.TEST", "['small_text:test']", "LOG.PERIOD", 5,
    "CHECKPOINT.BEST.METRIC", "small_text:test/loss", "TEST.EVAL_PERIOD", 10,
]  # fmt: skip
FSDP = ["PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.modules", "['TransformerBlock']"]


def train(folder, ranks, *options, output="run"):
    arguments = tool(*GPT, "--num-gpus", ranks, "OUTPUT_DIR", folder / output, *options)
    code, out = finish(fork(arguments, folder))
    assert code == 0, out
    return out


def weights(path):
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, 1, "SOLVER.MAX_ITER", 30)
    return folder / "run"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The first 20 of 30 iterations on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    arguments = tool(*GPT, "--num-gpus", 2, "OUTPUT_DIR", folder / "run", "SOLVER.MAX_ITER", 30, *FSDP)
    code, out = finish(
        fork([*arguments, "HOOKS", "[{'NAME': 'mishaps:Mishap', 'ARGS': {'what': 'stop', 'at': 19}}]"], folder)
    )
    assert code == 75, out
    return folder


def copy_of(run, folder):
    import shutil

    shutil.copytree(run, folder / "run")


def test_a_sharded_model_trains_like_a_whole_one(whole, sharded):
    ours, theirs = rows(sharded / "run"), [row for row in rows(whole) if row["iteration"] < 20]
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx({name: their[name] for name in our}, rel=1e-4), our["iteration"]


def test_each_rank_writes_its_shard_of_the_checkpoint(sharded):
    folder = sharded / "run/model_0000019.pth"
    names = {path.name for path in folder.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.pth", "checksums.json"}
    assert (sharded / "run/last_checkpoint").read_text() == "model_0000019.pth"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, []),
        pytest.param(2, FSDP, marks=pytest.mark.slow),
        pytest.param(2, ["PARALLEL.NAME", "ddp"], marks=pytest.mark.slow),
    ],
)
def test_a_sharded_run_resumes_with_any_strategy(whole, sharded, tmp_path, ranks, options):
    copy_of(sharded / "run", tmp_path)
    out = train(tmp_path, ranks, "SOLVER.MAX_ITER", 30, *options, "--resume")
    assert "model_0000019.pth" in out
    ours, theirs = rows(tmp_path / "run"), rows(whole)
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx({name: their[name] for name in our}, rel=2e-4), our["iteration"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["MODEL.COMPILE.ENABLED", "True", "MODEL.COMPILE.ARGS", "{'backend': 'aot_eager'}"],
        ["MODEL.ACTIVATION_CHECKPOINTING", "['TransformerBlock']"],
        ["SOLVER.ACCUMULATION_STEPS", 2],
    ],
    ids=["compiled", "activation checkpointing", "accumulation"],
)
def test_step_options_give_the_same_result_with_shards(whole, tmp_path, options):
    train(tmp_path, 2, "SOLVER.MAX_ITER", 30, *FSDP, *options)
    for our, their in zip(rows(tmp_path / "run"), rows(whole), strict=True):
        assert our == pytest.approx({name: their[name] for name in our}, rel=2e-4), our["iteration"]


@pytest.mark.slow
def test_compile_step_is_refused(tmp_path):
    arguments = tool(*GPT, "--num-gpus", 2, "OUTPUT_DIR", "run", *FSDP, "SOLVER.COMPILE_STEP", "True")
    code, out = finish(fork(arguments, tmp_path))
    assert code == 2
    assert "SOLVER.COMPILE_STEP: works in one process only, and there are 2" in out


@pytest.mark.slow
def test_a_checkpoint_file_resumes_with_shards(whole, tmp_path):
    copy_of(whole, tmp_path)
    (tmp_path / "run/last_checkpoint").write_text("model_0000019.pth")
    train(tmp_path, 2, "SOLVER.MAX_ITER", 30, *FSDP, "--resume")
    for our, their in zip(rows(tmp_path / "run"), rows(whole), strict=True):
        assert our == pytest.approx({name: their[name] for name in our}, rel=2e-4), our["iteration"]


@pytest.mark.slow
def test_an_exported_sharded_checkpoint_evaluates_to_the_same_loss(sharded, tmp_path):
    export = [sys.executable, HOOKLINE, "export", "--checkpoint", sharded / "run/model_0000019.pth"]
    code, out = finish(fork([*export, "--output", tmp_path / "gpt.pth"], tmp_path))
    assert code == 0, out
    trained = next(row for row in rows(sharded / "run") if row["iteration"] == 19)["small_text:test/loss"]
    evaluate = tool(*GPT, "--eval-only", "MODEL.WEIGHTS", tmp_path / "gpt.pth", "OUTPUT_DIR", tmp_path / "eval")
    code, out = finish(fork(evaluate, tmp_path))
    assert code == 0, out
    assert f"{trained:.5g}" in out, (trained, out)


@pytest.mark.slow
def test_a_damaged_shard_makes_a_resume_use_the_previous_checkpoint(sharded, tmp_path):
    copy_of(sharded / "run", tmp_path)
    part = tmp_path / "run/model_0000019.pth/__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    out = train(tmp_path, 2, "SOLVER.MAX_ITER", 20, *FSDP, "--resume")
    assert "the checksum of __1_0.distcp is wrong" in out
    assert "model_0000009" in out


def test_units_are_chosen_by_class_name_or_size_and_ranks_start_with_equal_weights(tmp_path):
    code, output, results = run_ranks("fsdp:chosen_units", 2, tmp_path)
    assert code == 0, output
    for result in results:
        assert result["class"] == ["", "blocks.0", "blocks.1"]
        assert result["name"] == ["", "blocks.1"]
        assert result["size"] == ["", "blocks.0", "blocks.1"]
        assert result["equal"]
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        assert "did you mean 'TransformerBlock'?" in result["error"]
        # With rank 0's values and each rank's later random numbers.
        assert result["deferred"] == dict.fromkeys(("small_gpt", "Tied", "Normed", "still tied"), True)
        found = result["meta"]
        for name in ("generators are left", "same on every mesh", "same on all ranks", "tied"):
            assert found[name], name
        assert found["angles"] == [0, 1, 2, 3, 4, 5]
        assert {round(std, 2) for name, std in found["std"].items() if "proj" not in name} == {0.02}
        assert {round(std, 2) for name, std in found["std"].items() if "proj" in name} == {0.01}
        assert "reset_parameters() of 0 (Forgets) leaves angles without values" in found["Forgets"]
        assert "cannot be built on torch's meta device, where tensors have no values" in found["Peeks"]
        assert (
            "0 (MultiheadAttention) has parameters or buffers of its own and no method" in found["MultiheadAttention"]
        )


def test_the_metrics_have_each_iteration_once(sharded):
    iterations = [json.loads(line)["iteration"] for line in (sharded / "run/metrics.json").read_text().splitlines()]
    assert iterations == sorted(set(iterations))


TORCHS = [
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
]


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """The largest difference between sharded and whole weights for each optimizer, or why it is refused."""
    folder = tmp_path_factory.mktemp("optimizers")
    names = [f"torch.optim:{name}" for name in TORCHS]
    code, output, results = run_ranks("fsdp:optimizers", 2, folder, *names)
    assert code == 0, output
    assert [name for name in names if isinstance(results[0][name], str) != isinstance(results[1][name], str)] == []
    return results[0]


@pytest.mark.parametrize("name", TORCHS)
def test_each_optimizer_updates_shards_like_whole_weights_or_is_refused(differences, name):
    found = differences[f"torch.optim:{name}"]
    if name in ("Adafactor", "Rprop", "SparseAdam"):  # torch 2.13 cannot step these over shards
        assert f"torch.optim:{name} with ARGS {{}} cannot update parameters that are sharded over ranks" in found
        assert 'use another optimizer, such as AdamW, or set PARALLEL.NAME to "ddp"' in found
    elif name == "Muon":  # computes in bfloat16
        assert found < 1e-3
    else:
        assert found < 1e-4


def test_a_fused_step_that_cannot_update_shards_is_refused(differences):
    assert "SGD with ARGS {'fused': True} cannot update parameters" in differences["fused"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    code, output, results = run_ranks("fsdp:models", 2, tmp_path_factory.mktemp("models"))
    assert code == 0, output
    return results[0]


def test_a_share_smaller_than_the_number_of_micro_batches_does_not_deadlock(models):
    assert models["accumulated"] < 1e-5
    assert models["items accumulated"] < 1e-5


def test_tied_weights_stay_tied_and_train_as_in_one_process(models):
    assert models["is tied"]
    assert models["tied []"] < 1e-5
    assert models["tied ['Linear']"] < 1e-5
    assert any("encoder shares a parameter with a module outside of it" in text for text in models["logged"])


def test_channels_last_weights_are_sharded_in_row_major_order_with_a_warning(models):
    assert models["channels last"] < 1e-5
    assert sum("MODEL.CHANNELS_LAST has no effect" in text for text in models["logged"]) == 1


def test_a_forward_pass_after_an_evaluation_uses_the_present_weights(models):
    assert models["stale, root"] == models["stale, all"] == 0

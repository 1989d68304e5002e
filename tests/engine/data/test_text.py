import pickle

import numpy as np
import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.data import (
    EpochIterator,
    Tokens,
    build_train_loader,
    python_docs_test,
    python_docs_train,
)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_a_file_of_tokens_is_split_into_blocks(tmp_path, dtype):
    np.arange(11, dtype=dtype).tofile(tmp_path / "tokens.bin")
    blocks = Tokens(str(tmp_path / "tokens.bin"), block_size=5, dtype=dtype)
    assert [(x.tolist(), y.tolist()) for x, y in blocks] == [
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10]),
    ]
    with pytest.raises(ConfigError, match=r"has 11 tokens of type .*, too few for a block of 11"):
        Tokens(str(tmp_path / "tokens.bin"), block_size=11, dtype=dtype)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "tet.txt"}, "there is no file tet.txt; did you mean 'text.txt'?"),
        ({"path": "."}, "there is no file ."),
        ({"block_size": 0}, "block_size: must be at least 1"),
        ({"dtype": "uint16"}, "text.txt does not end with a whole uint16: it was cut, or its dtype is another"),
        ({"path": "empty.txt"}, "empty.txt has 0 tokens of type uint8"),
    ],
)
def test_errors_name_the_file(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abcdefghijk")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError) as error:
        Tokens(**{"path": "text.txt", "block_size": 4, "dtype": "uint8", **args})
    assert message in str(error.value)


def test_a_copy_in_another_process_maps_the_file_again(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghijk")
    copied = pickle.dumps(Tokens(str(tmp_path / "text.txt"), 4, "uint8"))
    assert b"efgh" not in copied
    assert bytes(pickle.loads(copied)[1][0].tolist()) == b"efgh"


def batches(rank, ranks, monkeypatch, workers=0):
    monkeypatch.setattr(comm, "get_data_rank", lambda: rank)
    monkeypatch.setattr(comm, "get_data_size", lambda: ranks)
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SEED", 1, "DATALOADER.BATCH_SIZE", 4])
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATASETS.TRAIN = [{"NAME": "Tokens", "ARGS": {"path": "numbers", "block_size": 3}}]
    return EpochIterator(build_train_loader(cfg))


def read(iterators, steps):
    """The first token of each sample, in each step over all ranks."""
    return [[token for it in iterators for token in next(it)[0][:, 0].tolist()] for _ in range(steps)]


def test_a_resume_on_any_number_of_ranks_reads_the_remaining_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(121, dtype=np.uint16).tofile("numbers")  # 40 samples, each starts with another token
    whole = read([batches(0, 1, monkeypatch)], 20)
    assert sorted(token for step in whole[:10] for token in step) == list(range(0, 120, 3))
    for before, after in ((1, 2), (2, 1), (2, 4)):
        first = [batches(rank, before, monkeypatch) for rank in range(before)]
        assert read(first, 7) == whole[:7]
        second = [batches(rank, after, monkeypatch, workers=int(before == 1)) for rank in range(after)]
        for iterator in second:
            iterator.load_state_dict(first[0].state_dict())
        assert read(second, 13) == whole[7:]


def test_targets_are_the_bytes_that_follow_the_inputs():
    for dataset in (python_docs_train(64), python_docs_test(64)):
        x, y = dataset[0]
        assert x.shape == y.shape == (64,)
        assert x.dtype == torch.int64
        assert torch.equal(x[1:], y[:-1])
        assert bytes(x.tolist()).decode().isprintable() or "\n" in bytes(x.tolist()).decode()


def test_no_piece_is_both_for_training_and_for_testing():
    train, test = python_docs_train(64), python_docs_test(64)
    assert len(train) > 8 * len(test) > 0
    seen = {bytes(x.tolist()) for x in train.tensors[0]}
    repeated = sum(bytes(x.tolist()) in seen for x in test.tensors[0])
    assert repeated < 0.03 * len(test)  # such as lines of dashes, which the text itself repeats

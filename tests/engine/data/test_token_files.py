"""Packed documents: what a sample is, and that any number of ranks reads the same samples."""

import json
import pickle

import numpy as np
import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.data import EpochIterator, Tokens, build_train_loader
from hookline.engine.data.tokenizing import tokenize_files


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Three documents, "abc", "de" and "fghijk", as the folder ``data``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abc\nde\n\nfghijk\n")
    tokenize_files(["text.txt"], "data", lines=True)
    return tmp_path


def letters(tokens):
    return "".join("_" if token == -100 else chr(token) for token in tokens)


def test_documents_are_packed_end_to_end(packed):
    assert [(letters(x), letters(y)) for x, y in Tokens("data", block_size=4)] == [("abcd", "bcde"), ("efgh", "fghi")]


def test_a_sample_tells_the_documents_apart(packed):
    samples = [
        (letters(inputs["tokens"]), inputs["documents"].tolist(), letters(targets))
        for inputs, targets in Tokens("data", block_size=4, documents=True)
    ]
    assert samples == [("abcd", [0, 0, 0, 1], "bc_e"), ("efgh", [0, 1, 1, 1], "_ghi")]
    (inputs, targets) = Tokens("data", block_size=10, documents=True)[0]
    assert inputs["documents"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert letters(targets) == "bc_e_ghijk"
    assert inputs["documents"].dtype == inputs["tokens"].dtype == targets.dtype == torch.int64


def test_a_document_that_ends_with_the_sample_has_no_target(packed):
    assert letters(Tokens("data", block_size=5, documents=True)[0][1]) == "bc_e_"


def test_several_files_are_one_set(packed):
    (packed / "more.txt").write_text("12345")
    tokenize_files(["more.txt"], "more")
    first = [letters(x) for x, _ in Tokens("data", 4)]
    for path in (["data", "more"], ["da*", "mor?"]):
        assert [letters(x) for x, _ in Tokens(path, block_size=4)] == [*first, "1234"]
    assert [letters(x) for x, _ in Tokens("*[ae]", block_size=4)] == [*first, "1234"]
    (packed / "raw.bin").write_bytes(b"xyz")
    both = Tokens(["raw.bin", "raw.bin"], block_size=2, dtype="uint8")
    assert [letters(y) for _, y in both] == ["yz", "yz"]


def test_a_copy_in_another_process_maps_the_files_again(packed):
    copied = pickle.dumps(Tokens("data", 4, documents=True))
    assert b"fghijk" not in copied
    assert letters(pickle.loads(copied)[1][0]["tokens"]) == "efgh"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "dta"}, "there is no file or folder dta; did you mean 'data'?"),
        ({"path": "none*"}, "no file fits the pattern none*"),
        ({"path": []}, "path: is empty"),
        ({"path": "."}, "is not a folder of hookline tokenize: it has no tokens.npy"),
        ({"path": "data", "block_size": 11}, "data has 11 tokens of type uint8, too few for a block of 11"),
        ({"path": "data", "block_size": 0}, "block_size: must be at least 1"),
        ({"path": "text.txt", "documents": True, "dtype": "uint8"}, "documents: text.txt is a file without documents"),
        ({"path": "text.txt"}, "text.txt does not end with a whole uint16: it was cut, or its dtype is another"),
        ({"path": ["data", "text.txt"], "dtype": "uint8"}, "different tokenizers: bytes and unknown"),
    ],
)
def test_errors_name_the_file(packed, args, message):
    with pytest.raises(ConfigError) as error:
        Tokens(**{"block_size": 4, **args})
    assert message in str(error.value)


def test_a_damaged_folder_is_refused(packed):
    whole = (packed / "data/tokens.npy").read_bytes()
    for content in (whole[:-1], whole[:60], b"", np.lib.format.magic(1, 0)):
        (packed / "data/tokens.npy").write_bytes(content)
        with pytest.raises(ConfigError, match=r"data is damaged: .*make it again"):
            Tokens("data", 4)
    np.save(packed / "data/tokens.npy", np.arange(9, dtype=np.uint8))
    with pytest.raises(ConfigError, match="the last document does not end with the last token"):
        Tokens("data", 4)
    (packed / "data/info.json").write_text("{}")
    with pytest.raises(ConfigError, match="data is damaged"):
        Tokens("data", 4)


# ---------------------------------------------------------------------- position


def batches(rank, ranks, monkeypatch, workers=0):
    monkeypatch.setattr(comm, "get_data_rank", lambda: rank)
    monkeypatch.setattr(comm, "get_data_size", lambda: ranks)
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SEED", 1, "DATALOADER.BATCH_SIZE", 4])
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATASETS.TRAIN = [{"NAME": "Tokens", "ARGS": {"path": "numbers", "block_size": 3, "documents": True}}]
    return EpochIterator(build_train_loader(cfg))


def read(iterators, steps):
    """The first token of each sample, in each step over all ranks."""
    return [[token for it in iterators for token in next(it)[0]["tokens"][:, 0].tolist()] for _ in range(steps)]


def numbered(text):
    return list(range(int(text)))


def test_a_resume_on_any_number_of_ranks_reads_the_remaining_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count.txt").write_text("121")
    tokenize_files(["count.txt"], "numbers", f"{__name__}:numbered")  # 40 samples, each starts with another token
    whole = read([batches(0, 1, monkeypatch)], 20)
    assert sorted(token for step in whole[:10] for token in step) == list(range(0, 120, 3))
    for before, after in ((1, 2), (2, 1), (2, 4)):
        first = [batches(rank, before, monkeypatch) for rank in range(before)]
        assert read(first, 7) == whole[:7]
        second = [batches(rank, after, monkeypatch, workers=int(before == 1)) for rank in range(after)]
        for iterator in second:
            iterator.load_state_dict(first[0].state_dict())
        assert read(second, 13) == whole[7:]


def test_the_files_are_as_documented(packed):
    tokens, ends = np.load("data/tokens.npy"), np.load("data/ends.npy")
    assert (tokens.tobytes(), tokens.dtype, ends.tolist(), ends.dtype) == (
        b"abcdefghijk",
        np.uint8,
        [3, 5, 11],
        "int64",
    )
    assert json.loads((packed / "data/info.json").read_text()) == {
        "tokenizer": "bytes",
        "vocab_size": 256,
        "end_token": None,
        "dtype": "uint8",
        "documents": 3,
        "tokens": 11,
    }

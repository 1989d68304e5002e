import numpy as np
import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.data import TextLines, Tokens, python_docs_test, python_docs_train


def letters(line):
    return [ord(letter) for letter in line]


def test_lines_are_strings_or_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\n\ntwo words\n")
    assert list(map(TextLines(str(path)).__getitem__, range(2))) == ["one", "two words"]
    tokens = TextLines(str(path), tokenizer=f"{__name__}:letters", max_length=2)
    assert tokens[1].tolist() == [ord("t"), ord("w")]
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"text\.txt has no lines"):
        TextLines(str(path))


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

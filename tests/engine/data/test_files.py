"""Data sets of files: folders of images, tokens, text."""

import pickle

import numpy as np
import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.data import ImageFolder, Tokens
from hookline.engine.data.datasets import get_dataset


@pytest.fixture
def folder(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(("train/cat/a.png", "train/dog/b.bmp", "train/dog/old/c.png", "test/dog/d.png")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 6 + i, 3), 51 * i, np.uint8)).save(path)
    (tmp_path / "train/dog/notes.txt").write_text("no image")
    return tmp_path


def test_the_folders_are_the_classes(folder):
    dataset = ImageFolder(str(folder / "train"))
    assert dataset.classes == ["cat", "dog"]
    assert [label for _, label in dataset] == [0, 1, 1]
    assert torch.equal(dataset[1][0], torch.full((3, 8, 7), 0.2))
    test = ImageFolder(str(folder / "test"), size=4, mode="L", like=str(folder / "train"))
    assert (test[0][0].shape, test[0][1]) == ((1, 4, 4), 1)
    normalize = {"NAME": "Normalize", "ARGS": {"mean": [0.2, 0.0, 0.2], "std": 0.1}}
    image, _ = ImageFolder(str(folder / "train"), transforms=[normalize])[1]
    assert image[:, 0, 0].tolist() == pytest.approx([0, 2, 0])


def test_wrong_arguments_name_the_data_set(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for args, message in (
        ({"root": "nowhere"}, "No such file or directory: 'nowhere'"),
        ({"root": "train/cat"}, "root: .*train/cat"),
        ({"root": "train", "like": "test"}, "like: .*'cat'"),
        ({"root": "train", "transforms": ["RandomCrpo"]}, r"transforms\[0\]\.NAME: .*'RandomCrpo'"),
    ):
        with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN\[0\].*" + message):
            get_dataset({"NAME": "ImageFolder", "ARGS": args}, "DATASETS.TRAIN[0]")


def test_a_broken_file_is_named(folder):
    (folder / "train/cat/a.png").write_bytes(b"nothing")
    with pytest.raises(OSError, match="cannot identify") as caught:
        ImageFolder(str(folder / "train"))[0]
    assert str(folder / "train/cat/a.png") in caught.value.__notes__[0]


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_a_file_of_tokens_is_split_into_blocks(tmp_path, dtype):
    np.arange(11, dtype=dtype).tofile(tmp_path / "tokens.bin")
    blocks = Tokens(str(tmp_path / "tokens.bin"), block_size=5, dtype=dtype)
    assert [(x.tolist(), y.tolist()) for x, y in blocks] == [
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10]),
    ]
    copied = pickle.dumps(blocks)  # for another process, which maps the file again
    assert np.arange(3, 8, dtype=dtype).tobytes() not in copied
    assert pickle.loads(copied)[1][0].tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(ConfigError, match="11 tokens"):
        Tokens(str(tmp_path / "tokens.bin"), block_size=11, dtype=dtype)
    with pytest.raises(ConfigError, match=r"token\.bin; did you mean"):
        Tokens(str(tmp_path / "token.bin"), block_size=5, dtype=dtype)

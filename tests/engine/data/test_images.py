import numpy as np
import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import DATASET_REGISTRY, EpochIterator, ImageFolder, build_train_loader

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
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


def test_transforms_are_drawn_anew_in_each_epoch_whatever_the_workers(folder):
    cfg = get_cfg()
    args = {"root": str(folder / "train"), "size": [4, 4], "transforms": ["RandomHorizontalFlip", "RandomCrop"]}
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SEED", 1, "DATALOADER.BATCH_SIZE", 3])
    cfg.DATASETS.TRAIN = [{"NAME": "ImageFolder", "ARGS": args}]

    def epochs(workers):
        cfg.DATALOADER.NUM_WORKERS = workers
        batches = EpochIterator(build_train_loader(cfg))
        return [next(batches)[0] for _ in range(2)]

    first, second = epochs(0)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, epochs(1), (first, second)))


@pytest.mark.parametrize(("transforms", "deterministic"), [([], True), (["RandomCrop"], False)])
def test_it_is_known_whether_random_numbers_are_drawn(folder, transforms, deterministic):
    class Subclass(ImageFolder):
        def __getitem__(self, index):
            return super().__getitem__(index)

    assert ImageFolder(str(folder / "train"), transforms=transforms).deterministic is deterministic
    assert not Subclass(str(folder / "train"), transforms=transforms).deterministic


def test_normalize_takes_a_number_or_one_per_channel(folder):
    entry = {"NAME": "Normalize", "ARGS": {"mean": [0.2, 0.0, 0.2], "std": 0.1}}
    image, _ = ImageFolder(str(folder / "train"), transforms=[entry])[1]
    assert image[:, 0, 0].tolist() == pytest.approx([0, 2, 0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"root": "nowhere"}, "root: there is no folder nowhere"),
        ({"root": "train/cat"}, "root: train/cat has no folders; it needs one for each class"),
        ({"root": "train", "like": "test"}, "like: train has a folder 'cat', and test has not"),
        (
            {"root": "train", "transforms": ["RandomCrpo"]},
            "transforms[0].NAME: unknown transform 'RandomCrpo'; did you",
        ),
        ({"root": "train", "size": "4"}, "DATASETS.TRAIN[0].ARGS.size: expected int"),
    ],
)
def test_wrong_arguments_name_the_data_set(folder, monkeypatch, args, message):
    monkeypatch.chdir(folder)
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = [{"NAME": "ImageFolder", "ARGS": args}]
    with pytest.raises(ConfigError) as caught:
        build_train_loader(cfg)
    prefix = "" if "DATASETS" in message else "DATASETS.TRAIN[0] (ImageFolder): "
    assert str(caught.value).startswith(prefix + message)


def test_a_broken_file_is_named(folder):
    (folder / "train/cat/a.png").write_bytes(b"nothing")
    with pytest.raises(OSError, match="cannot identify") as caught:
        ImageFolder(str(folder / "train"))[0]
    assert caught.value.__notes__ == [f"image file {folder / 'train/cat/a.png'}"]


def test_the_registry_has_it():
    assert DATASET_REGISTRY.get("ImageFolder") is ImageFolder

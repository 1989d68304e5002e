import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import EpochIterator, build_train_loader

datasets = pytest.importorskip("datasets")


@pytest.fixture
def loader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    numbers = datasets.Dataset.from_dict({"x": [[float(i), 0.0] for i in range(9)], "label": list(range(9))})
    datasets.DatasetDict({"train": numbers, "test": numbers}).save_to_disk("saved")
    (tmp_path / "rows.csv").write_text("a,b\n" + "\n".join(f"{i},{i}" for i in range(9)))

    def make(workers=0, **args):
        cfg = get_cfg()
        cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SEED", 1, "DATALOADER.BATCH_SIZE", 2])
        cfg.DATALOADER.NUM_WORKERS = workers
        cfg.DATASETS.TRAIN = [{"NAME": "HuggingFaceDataset", "ARGS": args}]
        return build_train_loader(cfg)

    return make


@pytest.mark.parametrize(
    "args",
    [
        {"path": "saved", "split": "train", "columns": ["label"]},
        {"path": "csv", "data_files": "rows.csv", "split": "train", "streaming": True, "workers": 1},
    ],
)
def test_samples_are_dicts_of_tensors_and_a_resume_is_exact(loader, args):
    whole, killed, resumed = (EpochIterator(loader(**args)) for _ in range(3))
    for _ in range(2):
        next(whole), next(killed)
    resumed.load_state_dict(killed.state_dict())
    expected, batch = next(whole), next(resumed)
    assert list(batch) == (["label"] if "columns" in args else ["a", "b"])
    assert all(torch.equal(batch[name], expected[name]) for name in batch)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "saved", "split": "trian"}, r"split: saved has the splits train, test, not 'trian'; did you mean"),
        ({"path": "saved", "split": "train", "columns": ["y"]}, r"ValueError: Column name \['y'\] not in the dataset"),
        ({"path": "csv", "data_files": "no.csv", "split": "train"}, "FileNotFoundError: Unable to find"),
    ],
)
def test_errors_name_the_data_set(loader, args, message):
    with pytest.raises(ConfigError, match=rf"DATASETS\.TRAIN\[0\] \(HuggingFaceDataset\): {message}"):
        loader(**args)

"""``hookline check-data``."""

import pytest
from torch.utils.data import Dataset, IterableDataset

from hookline.engine.data import DATASET_REGISTRY


@DATASET_REGISTRY.register()
class SomeBroken(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index % 8 == 5:
            raise OSError("no such photo")
        return index


@DATASET_REGISTRY.register()
class Ragged(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [0] * (index + 1)


@DATASET_REGISTRY.register()
class CutStream(IterableDataset):
    def __iter__(self):
        yield from (1, 2)
        raise OSError("bad line")


@pytest.fixture
def check(command):
    def run(*words):
        code, out, _ = command("check-data", *words, "DATASETS.TRAIN", "['synthetic']")
        return code, out.splitlines()

    return run


def test_sound_data_gives_exit_code_0(check):
    assert check() == (0, ["DATASETS.TRAIN[0] (synthetic): can be read", "a batch of DATASETS.TRAIN: can be read"])


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_samples_are_listed(check, workers):
    words = ("DATASETS.TEST", "[{'NAME': 'SomeBroken', 'AS': 'val'}]", "DATALOADER.NUM_WORKERS", workers)
    code, lines = check(*words)
    assert code == 1
    error = "DATASETS.TEST[0] (val): OSError: no such photo"
    reading = "  while reading sample {} of SomeBroken"
    assert lines[1:] == [error, reading.format(5), error, reading.format(13)]
    if not workers:
        assert check(*words, "--max", "1")[1][-1] == "DATASETS.TEST[0] (val): there are more (--max 1)"


def test_samples_that_make_no_batch_are_found(check):
    code, lines = check("DATASETS.TEST", "['Ragged']")
    assert code == 1
    assert "the samples do not make a batch" in lines[3]
    assert "  while making a batch of the samples 0, 1 of Ragged" in lines


def test_a_stream_is_read_up_to_the_first_error(check):
    code, lines = check("DATASETS.TEST", "['CutStream']")
    assert code == 1
    assert lines[1:] == ["DATASETS.TEST[0] (CutStream): OSError: bad line", "  while reading sample 2 of CutStream"]

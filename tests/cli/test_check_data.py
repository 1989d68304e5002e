"""``hookline check-data``."""

import pytest
from run_tools import run_command
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
def command(capsys):
    def run(*arguments):
        code, out, _ = run_command(["check-data", *arguments, "DATASETS.TRAIN", "['synthetic']"], capsys)
        return code, out.splitlines()

    return run


def test_sound_data_gives_exit_code_0(command):
    assert command() == (0, ["DATASETS.TRAIN[0] (synthetic): can be read", "a batch of DATASETS.TRAIN: can be read"])


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_samples_are_listed(command, workers):
    entry = "[{'NAME': 'SomeBroken', 'AS': 'val'}]"
    code, lines = command("DATASETS.TEST", entry, "DATALOADER.NUM_WORKERS", workers)
    assert code == 1
    assert lines[1:] == [
        "DATASETS.TEST[0] (val): OSError: no such photo",
        "  while reading sample 5 of SomeBroken",
        "DATASETS.TEST[0] (val): OSError: no such photo",
        "  while reading sample 13 of SomeBroken",
    ]
    code, lines = command("DATASETS.TEST", entry, "--max", "1")
    assert lines[-1] == "DATASETS.TEST[0] (val): there are more (--max 1)"


def test_samples_that_make_no_batch_are_found(command):
    code, lines = command("DATASETS.TEST", "['Ragged']")
    assert code == 1
    assert lines[3].endswith(
        "MismatchError: the samples do not make a batch: each element in list of batch should be of equal size"
    )
    assert "  while making a batch of the samples 0, 1 of Ragged" in lines


def test_a_stream_is_read_up_to_the_first_error(command):
    code, lines = command("DATASETS.TEST", "['CutStream']")
    assert (code, lines[1:]) == (
        1,
        ["DATASETS.TEST[0] (CutStream): OSError: bad line", "  while reading sample 2 of CutStream"],
    )

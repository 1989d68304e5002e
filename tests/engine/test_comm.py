import os

import torch
from forker import forker
from ranks import PROGRAMS

from hookline.engine import comm


def test_without_a_process_group_collectives_return_their_input(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()) == (0, 1, 0, 1)
    assert comm.is_main_process()
    data, losses = {"a": object()}, {"a": torch.tensor(1.0)}
    assert comm.all_gather(data) == comm.gather(data) == [data]
    assert comm.reduce_dict(losses) == losses
    assert comm.broadcast_object(data) is data
    assert comm.all_reduce_sum(3) == 3
    comm.synchronize()
    with comm.main_process_first(), comm.main_process_first(local=False):
        comm.create_local_process_group(1)
    assert comm.get_store() is comm.get_local_process_group() is None


def test_a_script_creates_its_process_group_and_another_one_after_it(tmp_path):
    processes = [
        forker.start([PROGRAMS / "own_group.py", rank, tmp_path / "store"], tmp_path, os.environ, apart=True)
        for rank in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=60)[0].splitlines() == ["[[0, 2, True], [1, 2, False]]"] * 2
        assert process.returncode == 0

import json
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


def run_ranks(what, folder):
    """Run the program in two processes; returns their exit codes and what they printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    script, file = PROGRAMS / "own_group.py", folder / "store"
    processes = [
        forker.start([script, rank, file, what], folder, {**environment, "LOCAL_RANK": str(rank)}, apart=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    return [process.returncode for process in processes], outputs


def test_two_processes_gather_and_reduce(tmp_path):
    codes, outputs = run_ranks("collectives", tmp_path)
    assert codes == [0, 0]
    first, second = (json.loads(lines[-1]) for lines in outputs)
    assert (first["rank"], second["rank"]) == ([0, 2, 0, 2], [1, 2, 1, 2])
    assert (first["main"], second["main"]) == (True, False)
    assert first["all_gather"] == second["all_gather"] == [{"rank": 0}, {"rank": 1}]
    assert (first["gather"], second["gather"]) == ([], ["x", "xx"])
    assert first["seed"] == second["seed"]
    assert first["mean"] == {"a": 1.5, "b": 15.0}
    assert first["sum"] == {"a": 3.0, "b": 30.0}


def test_a_process_group_can_be_destroyed_and_created_again(tmp_path):
    codes, outputs = run_ranks("again", tmp_path)
    assert outputs == [["[0, 1]", "[0, 1]"]] * 2
    assert codes == [0, 0]

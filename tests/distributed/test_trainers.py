"""Trainers on two ranks: joint decisions, and what hooks see. The program has the checks."""

import pytest
from ranks import checks, run_ranks

checked, test_two_ranks = checks("trainers", 2)


def alone(folder, how):
    code, output, _ = run_ranks("trainers:alone", 2, folder, how, timeout=50)  # less than the ranks' timeout
    return code, output


def test_stop_training_in_a_step_of_one_rank_is_an_error_with_advice(tmp_path):
    code, output = alone(tmp_path, "stop")
    assert code == 1
    # On a busy machine the stack of rank 0 follows, which waits for rank 1.
    line = next(line for line in output.splitlines() if line.startswith("RuntimeError: StopTraining"))
    assert "was raised in step 5 of rank 1, and not on all ranks" in line
    assert "trainer.request_stop(reason) instead" in line


@pytest.mark.slow
def test_the_launcher_names_a_rank_that_is_interrupted_alone(tmp_path):
    code, output = alone(tmp_path, "interrupt")
    assert code == 1
    last = output.rpartition("Rank 1 left first:\n")[2]
    assert last.startswith("it ended by KeyboardInterrupt('in the step'); its exit code was 130")

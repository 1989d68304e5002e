"""Trainers on two ranks: joint decisions, and what hooks see. The program has the checks."""

from ranks import checks, run_ranks

checked, test_two_ranks = checks("trainers", 2)


def test_stop_training_in_a_step_of_one_rank_is_an_error_with_advice(tmp_path):
    code, output, _ = run_ranks("trainers:alone", 2, tmp_path, timeout=50)  # less than the ranks' timeout
    assert code == 1
    # On a busy machine the stack of rank 0 follows, which waits for rank 1.
    line = next(line for line in output.splitlines() if line.startswith("RuntimeError: StopTraining"))
    assert "was raised in step 5 of rank 1, and not on all ranks" in line
    assert "trainer.request_stop(reason) instead" in line

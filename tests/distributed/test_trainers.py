"""Trainers on two ranks: joint decisions, and what hooks see."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    code, output, results = run_ranks("trainers:main", 2, tmp_path_factory.mktemp("trainers"))
    assert code == 0, output
    return results


def test_all_ranks_stop_at_the_same_step_when_one_requests_it(both):
    for results in both:
        assert results["stop"] == ["rank 1 had enough", 75, True]
        assert results["raised stop"] == ["a hook raised it", "a method raised it"]
        assert results["two reasons"] == "0"


def test_a_request_of_all_ranks_takes_effect_at_the_end_of_the_step(both):
    assert [results["everywhere"] for results in both] == [["all", 8]] * 2


def test_requests_of_single_ranks_are_served_by_all_in_order(both):
    for results in both:
        assert results["requests"] == ["eval", "write", "save", "write"]  # the last one is that of the end


def test_periods_in_seconds_end_at_the_same_step_on_all_ranks(both):
    assert [results["periods in seconds"] for results in both] == [2, 2]


def test_ranks_do_not_exchange_requests_in_every_step(both):
    assert both[0]["exchanges"] < 100  # of 600 steps


def test_ranks_exchange_gradients_in_a_train_step_of_the_model(both):
    for results in both:
        assert results["train_step"] == [[[1.5, 1.5]], [0.5, 0.5], True]


def test_stop_training_in_a_step_of_all_ranks_ends_the_run(both):
    assert [results["given up"] for results in both] == [["given up", 5]] * 2


def test_hooks_registered_on_all_ranks_join_with_the_next_step(both):
    assert [results["joined"] for results in both] == [[[6, True], [7, True]]] * 2


def test_a_hook_registered_on_one_rank_only_is_an_error_on_all_ranks(both):
    for results in both:
        assert results["one has another"] == (
            "hooks were registered or removed on some ranks only (rank 1 has PeriodicWriter, rank 0 does not). "
            "Register and remove hooks on all ranks at the same step"
        )


def test_a_nan_loss_without_gradient_stops_all_ranks_at_the_same_step(both):
    for results in both:
        assert results["nan beside"].startswith("on rank 1 the loss is NaN or infinite at iteration 4")


def test_a_nan_gradient_of_a_share_without_items_never_reaches_the_weights(both):
    for results in both:
        message, finite = results["no items, raise"]
        assert message.startswith("the gradient of linear.weight and 1 others is NaN or infinite at iteration 2")
        assert "divide by max(num_items, 1)" in message
        assert finite
        assert results["no items, skip"] == [["completed", 4, 1], True]
        (reason, iteration, _), finite = results["no items, stop"]
        assert "at iteration 2" in reason
        assert (iteration, finite) == (3, True)


def test_num_items_is_the_number_in_the_global_batch(both):
    assert [results["items"] for results in both] == [[6.0, 6.0], [6.0, 6.0]]


def alone(folder, how):
    code, output, _ = run_ranks("trainers:alone", 2, folder, how, timeout=50)  # less than the ranks' timeout
    return code, output


def test_stop_training_in_a_step_of_one_rank_is_an_error_with_advice(tmp_path):
    code, output = alone(tmp_path, "stop")
    assert code == 1
    # On a busy machine the stack of rank 0 follows, which waits for rank 1.
    line = next(line for line in output.splitlines() if line.startswith("RuntimeError: StopTraining"))
    assert "StopTraining('in the step') was raised in step 5 of rank 1, and not on all ranks" in line
    assert "rank(s) 0 did not come within 1 s" in line
    assert "trainer.request_stop(reason) instead" in line


def test_a_request_of_a_hook_registered_on_one_rank_only_is_an_error(tmp_path):
    code, output = alone(tmp_path, "hook")
    assert code == 1
    last = output.rstrip().splitlines()[-1]
    assert "hooks were registered or removed on some ranks only: those of rank 1 made a request" in last
    assert "of other ranks did not within 1 s" in last


@pytest.mark.slow
def test_the_launcher_names_a_rank_that_is_interrupted_alone(tmp_path):
    code, output = alone(tmp_path, "interrupt")
    assert code == 130
    last = output.rpartition("Rank 1 was interrupted first:")[2]
    assert last.rstrip().endswith("KeyboardInterrupt: in the step")
    assert "failed first" not in output


@pytest.mark.slow
def test_a_nan_loss_without_gradient_fails_on_its_rank_at_once(tmp_path):
    code, output = alone(tmp_path, "nan")
    assert code == 1
    assert "FloatingPointError: on rank 1 the loss is NaN or infinite at iteration 4:" in output.splitlines()[-1]


def test_writers_and_checkpointers_on_rank_0_only_work_as_in_detectron2(both):
    assert both[0]["detectron2's way"] == [1, 3, 5, 7, 8, 9]
    assert both[0]["files"] == ["model_0000003.pth", "model_0000007.pth", "model_final.pth"]
    assert both[0]["names"] == ["bias", "weight"]
    assert both[1]["detectron2's way"] == []


def test_a_rank_that_put_no_value_does_not_count(both):
    assert both[0]["own"]["own/some"] == [0, 5, 0, 5, 0, 5, 0]
    assert both[1]["own"]["own/some"] == [5, 5, 5]


def test_hooks_of_all_ranks_see_the_mean_losses_over_ranks(both):
    for results in both:
        assert results["means"] < 1e-6
        assert results["losses of all ranks"] == [7, True]
        # Iterations 0 to 6: the values of the ranks are the iteration, and one more.
        assert results["own"]["own/mean"] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
        assert results["own"]["own/sum"] == [1, 3, 5, 7, 9, 11, 13]
        assert results["own"]["own/max"] == [1, 2, 3, 4, 5, 6, 7]
        assert results["own"]["own/min"] == [0, 1, 2, 3, 4, 5, 6]
        assert results["monitored"] == {"mean": 6.5, "sum": 13, "max": 7, "min": 6}
        assert results["own"]["own/rare"] == [3, 11, 13]
        assert results["times"] == ["slowest_rank"]


def test_a_strategy_is_chosen_by_name(both):
    assert [both[0][name] for name in ("auto", "none", "third")] == ["DDP", "Strategy", 0.5]


def test_before_evaluation_copies_the_buffers_of_rank_0(both):
    assert both[0]["buffers"] == both[1]["buffers"] == [True, True]


def test_a_learning_rate_that_one_rank_sets_alone_is_an_error(both):
    for results in both:
        message, iteration = results["drift"]["rate"]
        assert "'lr' of parameter group 0 is 0.5 on rank 1 and 0.1 on rank 0" in message
        assert iteration < 11


def test_a_weight_that_one_rank_changes_alone_is_an_error_at_the_next_save(both):
    for results in both:
        message, iteration = results["drift"]["weight"]
        assert "after iteration 7 rank 1 has another weight than rank 0 (by up to 0.5)" in message
        assert iteration == 7
        assert "after iteration 11 rank 1 has another weight" in results["drift"]["at the end"][0]
        assert "rank 1 has another bias than rank 0" in results["drift"]["copies of shards"]


def test_frozen_weights_and_rounding_may_differ_between_ranks(both):
    assert [results["drift"]["rounding"] for results in both] == ["completed"] * 2


def test_a_rank_that_builds_another_model_is_named_with_the_parameter(both):
    for results in both:
        assert results["widths"].startswith(
            "rank 1 has built another model than rank 0: 1.weight is (3, 4) torch.float32, on rank 0 (2, 4)"
        )


def test_parameters_without_gradient_are_named_and_the_suggested_keys_help(both):
    for rank, results in enumerate(both):
        assert results["unused"].startswith(
            f"on rank {rank} the losses of the previous step did not depend on these parameters: "
            "unused.weight, unused.bias."
        )
        assert "PARALLEL.ARGS.find_unused_parameters" in results["unused"]
        assert results["with find_unused_parameters"] == results["with static_graph"] == "completed"

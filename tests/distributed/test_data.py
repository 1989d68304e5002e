"""All ranks read one order of the samples, from any sampler; data sets must be as long on each rank."""

from itertools import chain

from ranks import run_ranks


def test_samplers_that_draw_give_each_rank_its_part_of_one_order_and_the_same_after_a_resume(tmp_path):
    code, output, [alone] = run_ranks("data:samplers", 1, tmp_path / "one")
    assert code == 0, output
    code, output, [first, second] = run_ranks("data:samplers", 2, tmp_path / "two")
    assert code == 0, output
    assert first == second
    for name, found in first.items():
        whole = found["whole"]
        assert whole == alone[name]["whole"], name
        assert found["resumed"] == {step: whole[step] for step in map(str, range(12, 16))}, name
        epochs = [list(chain(*(whole[str(step)] for step in range(at, at + 8)))) for at in (0, 8)]
        assert epochs[0] != epochs[1]
        if "Weighted" not in name:
            assert [sorted(epoch) for epoch in epochs] == [list(range(32))] * 2, name


def test_a_data_set_whose_length_differs_by_rank_is_refused_at_the_start(tmp_path):
    code, output, results = run_ranks("data:lengths", 2, tmp_path)
    assert code == 0, output
    assert results[0] == results[1]
    train, test, shards = results[0]
    assert "DATASETS.TRAIN: the data set has 24 samples on rank 1, and 20 on rank 0" in train
    assert "DATASETS.TEST" in test
    assert "9 samples on rank 1, and 8 on rank 0" in test
    assert shards == ""

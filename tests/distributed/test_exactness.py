"""Two ranks train to the losses and weights of one: accumulation, items, unequal batches."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


EXACT = ("plain", "clipped", "accumulated", "items", "items accumulated", "static", "static accumulated")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    code, output, (results,) = run_ranks("exactness:main", 1, tmp_path_factory.mktemp("one"))
    assert code == 0, output
    return results


def test_two_ranks_have_the_losses_and_weights_of_one(alone, tmp_path):
    code, output, results = run_ranks("exactness:main", 2, tmp_path)
    assert code == 0, output
    for name in EXACT:
        for result in results:
            assert result[name]["losses"] == pytest.approx(alone[name]["losses"], abs=2e-6), name
            for ours, theirs in zip(result[name]["weights"], alone[name]["weights"], strict=True):
                assert ours == pytest.approx(theirs, abs=2e-6), name
        assert all(result[name]["losses"] == results[0][name]["losses"] for result in results), name
    losses = alone["plain"]["losses"]
    assert sum(losses[-4:]) < sum(losses[:4])
    # One exchange per update, not per micro-batch.
    assert [result["exchanges"] for result in results] == [12, 12]
    # bfloat16 has 8 bits of precision.
    for ours, theirs in zip(results[0]["bf16"]["weights"], alone["bf16"]["weights"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-2)
    assert results[0]["bf16"]["weights"] != results[0]["plain"]["weights"]
    assert alone["plain"]["ranks"] == []
    assert results[1]["plain"]["ranks"] == ["slowest_rank"]

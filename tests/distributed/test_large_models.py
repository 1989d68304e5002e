"""Models that no single rank holds: the memory of each rank from the start of a run to its end."""

import sys

import pytest
from ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
def test_four_ranks_start_train_save_and_resume_with_little_more_than_their_shards(tmp_path):
    # 50 million parameters: 0.8 GB with gradients and AdamW's averages, a quarter of which is a rank's.
    for resume, start in (("", 0), ("yes", 2)):
        options = 384, 28, resume, "PARALLEL.ARGS.init", "meta"
        code, output, results = run_ranks("large:run", 4, tmp_path, *options, timeout=950, rank_timeout=900)
        assert code == 0, output
        for result in results:
            assert result["start"] == start
            assert result["whole"] > 7e8
            peaks = {part: bytes / result["whole"] for part, bytes in result["peaks"].items()}
            assert peaks["build"] < 0.15, peaks
            assert max(peaks.values()) < 0.4, peaks

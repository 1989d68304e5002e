"""Models that no single rank holds: the memory of each rank from the start of a run to its end."""

import sys

import pytest
from ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
def test_two_ranks_start_train_save_and_resume_with_little_more_than_their_shards(tmp_path):
    # 19 million parameters: 0.3 GB with gradients and AdamW's averages, half of which is a rank's.
    for resume, start in (("", 0), ("yes", 1)):
        options = 256, 24, resume, "PARALLEL.ARGS.init", "meta"
        code, output, results = run_ranks("large:run", 2, tmp_path, *options, timeout=300, rank_timeout=250)
        assert code == 0, output
        for result in results:
            assert result["start"] == start
            assert result["whole"] > 3e8
            peaks = {part: bytes / result["whole"] for part, bytes in result["peaks"].items()}
            assert peaks["build"] < 0.2, peaks
            assert max(peaks.values()) < 0.7, peaks

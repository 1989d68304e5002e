"""``hookline benchmark gpu`` where there is no GPU."""

import json

import gpu_parts
import pytest
import torch

from hookline.benchmarks.gpu.checks import overlap
from hookline.benchmarks.gpu.report import Report, Row, Skip
from hookline.benchmarks.gpu.run import PARTS, markdown, run_part
from hookline.cli import main


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """Run a part in this process on the CPU; returns its rows by what they check."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        rows = []
        PARTS[name].function(Report(rows.append, "cpu"))
        return {row.what: row for row in rows}

    return run


def test_without_a_gpu_everything_is_skipped_and_nothing_fails(no_gpu, capsys):
    assert main(["benchmark", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "no GPU, torch" in out
    for name in PARTS:
        assert f"skipped: {name}: torch sees no CUDA device" in out
    assert out.endswith(f"0 passed, 0 failed, {len(PARTS)} skipped\n")


def test_results_as_json(no_gpu, capsys):
    assert main(["benchmark", "gpu", "--only", "amp,resume", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["amp", "resume"]
    assert found["amp"][0]["result"] == "skipped"


def test_the_parts_are_listed(capsys):
    assert main(["benchmark", "gpu", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert all(line.endswith(".") for line in lines)


def test_an_unknown_part_is_an_error(capsys):
    assert main(["benchmark", "gpu", "--only", "resum"]) == 2
    assert "--only: there is no part 'resum'; did you mean 'resume'?" in capsys.readouterr().err


def test_checks_run_on_the_cpu_too(rows_of):
    results = {what: row.result for name in ("nonfinite", "staging") for what, row in rows_of(name).items()}
    assert results.pop("NaN is skipped, fused AdamW, CUDA_GRAPH") == "skipped"
    assert results.pop("NaN is skipped, fused SGD with momentum, CUDA_GRAPH") == "skipped"
    assert set(results.values()) == {"passed"}
    assert len(results) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("nonfinite", "staging")])
def test_every_part_runs_on_the_cpu(rows_of, name):
    rows = rows_of(name)
    assert rows
    assert not [row for row in rows.values() if row.result == "failed"]


@pytest.mark.slow
def test_a_part_that_crashes_or_hangs_keeps_its_rows(capfd):
    before, crash = run_part(gpu_parts.crashing, "crashing", "cpu", 120)
    assert before == Row("before", numbers={"ms": 1.5})
    assert crash == Row("crashing", "failed", "its process ended with 3: the last words")
    assert "the last words" in capfd.readouterr().err
    *_, hang = run_part(gpu_parts.hanging, "hanging", "cpu", 20)
    assert hang == Row("hanging", "failed", "no end within 20 s")
    alone, whole = run_part(gpu_parts.raising, "raising", "cpu", 120)
    assert alone == Row("fails alone", "failed", "RuntimeError: first line (gpu_parts.py:22)")
    assert whole == Row("the whole part", "failed", "RuntimeError: fails the part (gpu_parts.py:23)")


def test_a_skipped_check_says_why_and_later_ones_run():
    rows = []
    report = Report(rows.append, "cpu")
    with report.attempt("one"):
        raise Skip("needs more")
    with report.attempt("two") as numbers:
        numbers["ms"] = 2
    assert rows == [Row("one", "skipped", "needs more"), Row("two", numbers={"ms": 2})]


def test_tables_have_a_column_for_each_number():
    table = markdown(
        [Row("a | b", numbers={"ms": 1.5, "ratio": 0.5}), Row("c", "failed", "why"), Row("d", numbers={"mfu": 1})]
    )
    assert table.splitlines() == [
        "|  | result | ms | ratio | mfu |",
        "| --- | --- | --- | --- | --- |",
        "| a \\| b | passed | 1.5 | 0.5 |  |",
        "| c | failed: why |  |  |  |",
        "| d | passed |  |  | 1 |",
    ]


def event(cat, start, duration, stream, name="kernel", **args):
    return {"cat": cat, "name": name, "ts": start, "dur": duration, "args": {"stream": stream, **args}}


def test_overlap_of_copies_and_kernels_in_a_trace():
    copy = "Memcpy HtoD (Pinned -> Device)"
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("kernel", 0, 10, 7),
        event("kernel", 5, 10, 7),  # until 15
        event("gpu_memcpy", 8, 4, 20, copy, bytes=10**6),  # covered
        event("gpu_memcpy", 13, 4, 20, copy, bytes=10**6),  # half of it
        event("gpu_memcpy", 30, 2, 7, "Memcpy HtoD (Pageable -> Device)", bytes=10**6),
        event("gpu_memcpy", 40, 2, 7, copy, bytes=4),  # too small to count
        event("gpu_memcpy", 50, 9, 7, "Memcpy DtoH (Device -> Pinned)", bytes=10**6),
    ]
    assert overlap(events) == {"copies": 3, "pinned": 2, "own_stream": 2, "overlap": 0.6}
    assert overlap([])["copies"] == 0

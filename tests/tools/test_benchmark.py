import gc
import json
import logging
import sys
from importlib import import_module

import pytest
from ranks import PROGRAMS, finish, fork

from hookline.benchmarks import show
from hookline.cli import main
from hookline.cli.benchmark import number


@pytest.fixture
def benchmark(capsys, monkeypatch):
    """Run ``hookline benchmark``; returns its results."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)  # a tenth of a second each; no time is asserted here

    def run(*arguments):
        capsys.readouterr()
        assert main(["benchmark", *map(str, arguments), "--json"]) == 0
        # The last line: other tests may have turned on hookline's console log.
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


SET_UPS = {"digits": ["by hand", "lean", "default", "by hand, logging", "compiled step"]}
SET_UPS["tiny"] = [*SET_UPS["digits"], "compiled, 20 steps a call"]


@pytest.mark.slow
def test_overhead_compares_five_set_ups_on_two_models(benchmark):
    results = benchmark("overhead", "--steps", 20, "--rounds", 1, "--backend", "eager")
    assert set(results) == {"tiny", "digits"}
    for name, work in results.items():
        assert list(work) == SET_UPS[name]
        assert all(set(numbers) == {"us_per_step", "ratio"} for numbers in work.values())
        assert work["by hand"]["ratio"] == 1.0


def test_overhead_reports_a_missing_compiler(benchmark, monkeypatch):
    def no_compiler(graph, inputs):  # inductor takes seconds to find out
        raise RuntimeError("no working C++ compiler")

    from hookline.benchmarks import steps

    compiled = steps.compiled
    monkeypatch.setattr(steps, "compiled", lambda cfg, backend, steps: compiled(cfg, no_compiler, steps))
    monkeypatch.setattr(steps, "WORKS", {"tiny": steps.WORKS["tiny"]})
    results = benchmark("overhead", "--steps", 20, "--rounds", 1)
    assert results["tiny"]["compiled step"]["status"].startswith("skipped: SOLVER.COMPILE_STEP")
    assert list(results["tiny"]) == SET_UPS["tiny"]
    assert results["tiny"]["lean"]["ratio"] > 0


def test_the_default_set_up_writes_what_a_run_writes(benchmark, tmp_path, monkeypatch):
    from hookline.benchmarks import measure, work

    lines = []
    handle = logging.Handler.handle
    monkeypatch.setattr(logging.Handler, "handle", lambda self, record: (lines.append(self), handle(self, record)))
    with measure.usual_logging():
        assert work.default(work.tiny_config(str(tmp_path)))(100) > 0
    console = [line for line in lines if "Console" in type(line).__name__]
    assert len(console) >= 5
    assert "total_loss" in (tmp_path / "metrics.json").read_text()
    assert "iter: 99" in (tmp_path / "log.txt").read_text()
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "model_final.pth").is_file()


def test_logging_is_restored(benchmark, tmp_path):
    from hookline.benchmarks import measure

    logger = logging.getLogger("hookline")
    before = logger.handlers[:], logger.level, logger.propagate
    with measure.usual_logging():
        assert logger.isEnabledFor(logging.INFO)
    assert (logger.handlers, logger.level, logger.propagate) == before


def test_hooks(benchmark):
    results = benchmark("hooks", "--steps", 30, "--rounds", 1)
    assert list(results)[:2] == ["no event", "after_step"]
    assert set(results["after_step"]) == {"1 hooks", "10 hooks", "100 hooks"}
    assert set(results["after_step"]["1 hooks"]) == {"us_per_step", "us_per_hook"}


def test_storage(benchmark):
    results = benchmark("storage", "--steps", 100, "--rounds", 1)
    assert set(results) == {"put 10 floats", "put 10 tensors", "put 10 floats, read every 20"}
    assert all(numbers["us_per_step"] > 0 for numbers in results.values())


def test_loader(benchmark):
    results = benchmark("loader", "--steps", 5, "--rounds", 1)
    kinds = ("arrays", "samples", "samples with random draws", "deterministic samples")
    assert set(results) == {f"{kind}, {workers} workers" for kind in kinds for workers in (0, 2)}
    assert all(set(numbers) == {"plain_per_s", "hookline_per_s", "time_ratio"} for numbers in results.values())


@pytest.mark.slow
def test_loaders_compares_steps_with_loaders_of_ones_own(benchmark):
    results = benchmark("loaders", "--steps", 5, "--rounds", 1)
    assert list(results) == ["generator", "list of batches", "DataLoader without batches"]
    for rows in results.values():
        assert list(rows) == ["by hand", "lean", "default"]
        assert rows["default"]["ratio"] > 0


def test_evaluation_compares_passes_and_files(benchmark, monkeypatch):
    module = import_module("hookline.benchmarks.evaluation")
    monkeypatch.setattr(module, "WORKS", {"tiny": module.WORKS["tiny"]})
    results = benchmark("evaluation", "--steps", 1, "--rounds", 1)
    assert list(results) == ["tiny, accuracy", *(f"tiny, predictions, {form}" for form in ("jsonl", "csv", "npz"))]
    assert all(set(numbers) == {"ms_by_hand", "ms_hookline", "ratio"} for numbers in results.values())


@pytest.mark.slow
def test_start_compares_whole_processes(benchmark, monkeypatch):
    once = lambda runs, steps, rounds: {name: run(steps) for name, run in runs.items()}  # noqa: E731
    monkeypatch.setattr(import_module("hookline.benchmarks.start"), "interleaved", once)
    results = benchmark("start", "--steps", 1, "--rounds", 1)
    assert set(results["digits"]) == {"seconds", "more", "ratio"}
    assert {"import torch", "train --help", "digits, --dry-run", "digits, by hand"} < set(results)


@pytest.mark.slow
def test_resume_and_memory_compare_runs_in_processes_of_their_own(benchmark, monkeypatch):
    monkeypatch.setattr(import_module("hookline.benchmarks.start"), "WORKS", ("tiny",))
    results = benchmark("resume", "--rounds", 1)
    assert list(results) == ["tiny, fresh", "tiny, resumed", "tiny, torch.load"]
    assert results["tiny, resumed"]["ratio"] > 0
    results = benchmark("memory", "--rounds", 1, "--steps", 20)
    assert list(results) == [f"tiny, {kind}" for kind in ("imports", "by hand", "lean", "default")]
    assert results["tiny, default"]["peak_mb"] > 50


@pytest.mark.slow
def test_compile_step_measures_two_starts(benchmark):
    results = benchmark("compile_step", "--backend", "eager")
    assert list(results) == ["ordinary", "first start", "second start"]
    assert all(0 < row["seconds_to_step_2"] < row["seconds_to_epoch_2"] for row in results.values())


@pytest.mark.slow
def test_ranks_measures_both_strategies_and_counts_the_collectives_of_a_step(tmp_path):
    code, output = finish(fork([sys.executable, PROGRAMS / "benchmark_ranks.py"], tmp_path))
    assert code == 0, output
    results = json.loads(output.splitlines()[-1])
    assert set(results) == {
        f"{strategy}, {model}" for strategy in ("ddp", "fsdp2") for model in ("MLP", "ConvNet", "GPT")
    }
    for rows in results.values():
        assert list(rows) == ["by hand", "lean", "default"]
        assert all(numbers["ratio"] > 0 and numbers["calls"] > 0 for numbers in rows.values())
    for strategy, count in (("ddp", 1), ("fsdp2", 2)):  # other models' steps may take a second, when ranks exchange
        assert [numbers["collectives"] for numbers in results[f"{strategy}, MLP"].values()] == [count] * 3


def test_checkpoint(benchmark, tmp_path):
    results = benchmark("checkpoint", "--size", "20k", "--rounds", 1, "--folder", tmp_path)
    assert results["size"]["parameters"] == 20_000
    assert results["size"]["file_mb"] >= 0.24  # weights, and two moments of each
    times = {"seconds", "ratio", "least", "most"}
    for name in ("plain write + fsync", "torch.save + fsync", "save, asynchronous: stalled", "plain read", "load"):
        assert set(results[name]) == times
    for name in ("save", "save, asynchronous"):
        assert set(results[name]) == {*times, "memory_mb"}
    assert results["save, asynchronous: stalled"]["least"] <= results["save, asynchronous"]["most"]
    assert not list(tmp_path.iterdir())


def test_length(benchmark):
    results = benchmark("length", "--steps", 60, "--size", 200)
    assert list(results) == ["lean", "default", "200 x 10 scalars"]
    assert set(results["lean"]) == {"steps", "first_us", "last_us", "last_over_first"}
    assert set(results["200 x 10 scalars"]) == {"grown_mb"}


def test_an_unknown_name_in_a_comparison_is_an_error(capsys):
    assert main(["benchmark", "--compare", "lightnin"]) == 2
    assert "lightnin: expected hookline, lightning" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_names_missing_and_failing_trainers(benchmark, monkeypatch):
    compare = import_module("hookline.benchmarks.compare")

    # "broken" is known to this process only.
    monkeypatch.setattr(compare, "PEERS", dict.fromkeys(("hookline", "missing", "broken")))
    monkeypatch.setattr(compare, "installed", lambda name: "" if name == "missing" else "1.0")
    results = benchmark("--compare", "missing,broken", "--steps", 40, "--rounds", 1)
    assert list(results) == ["hookline", "missing", "broken"]
    assert set(results["hookline"]) == {"version", "by_hand_us", "lean", "default"}
    assert results["missing"] == {"status": "not installed"}
    assert results["broken"]["status"].startswith("failed: KeyError")


@pytest.mark.parametrize(("text", "value"), [("100M", 10**8), ("2.5k", 2500), ("40", 40), ("1B", 10**9)])
def test_numbers(text, value):
    assert number(text) == value


def test_a_table_shows_every_number(capsys):
    show({"a": {"b": {"us": 1.5}, "c": {"us": 2.0}}, "d": {"status": "not installed"}})
    out = capsys.readouterr().out
    assert all(text in out for text in ("a", "  b  us", "1.5", "2.0", "not installed"))


@pytest.mark.slow
def test_scaling_measures_the_exchanges_of_ranks(benchmark):
    results = benchmark("scaling", "--size", 3, "--rounds", 1)
    assert list(results["metrics"]) == ["2 ranks"]
    assert all(numbers["2 ranks"]["wall_ms"] > 0 for numbers in results.values())
    assert results["sharded save"]["2 ranks"]["cpu_rank0_ms"] > 0
    assert results["failure"]["2 ranks"]["wall_ms"] < 40_000

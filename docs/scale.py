"""Computes the tables of docs/scale.md: steps on 8 to 16,384 GPUs, checkpoint intervals, the engine's own work.

    python docs/scale.py            # rewrite the tables
    python docs/scale.py --check    # exit with 1 if a table is out of date

The cost model is in docs/scale_model.py. What is measured is in docs/scale_measured.json, made by
docs/scale_measure.py.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from scale_measure import SHAPE
from scale_model import (
    NODE,
    PEAK,
    TEXT,
    TITAN,
    TITAN_TOKENS,
    Model,
    build,
    calibrated,
    daly,
    fits,
    step,
    tensor_parallel,
)
from written import write_or_check

from hookline.engine.modeling import GPT
from hookline.engine.program.estimate import Layout, Transformer

HERE = Path(__file__).resolve().parent
PAGE = HERE / "scale.md"
MEASURED = json.loads((HERE / "scale_measured.json").read_text())

GPUS = (8, 64, 512, 2048, 8192, 16384)
# Published: nanotron/old_bench on the Hugging Face Hub, llama-1B/8_GPUS/dp-4_tp-2_pp-1_mbz-8, dp-2_tp-4_pp-1_mbz-8 and
# dp-1_tp-8_pp-1_mbz-8, log_metrics.csv: tokens per second and GPU, by the degree of tensor parallelism.
NANOTRON = {2: 33200, 4: 27800, 8: 20300}
NANOTRON_TFLOPS = 300.0  # per GPU, in the first of these logs
# Published: Llama 3 405B, arXiv:2407.21783, section 3.3.4: unexpected interruptions, days, GPUs.
INTERRUPTIONS, DAYS, DAYS_GPUS = 419, 54, 16384
# Measured: docs/performance.md, 100M parameters with AdamW, bytes per second: a save, and the part that the step waits
# for if the save is asynchronous.
SAVE_BYTES, SAVE_SECONDS, STALL_SECONDS = 1.2e9, 0.98, 0.17
RESTART = 300.0  # seconds to start a run again: assumed
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "DDP": lambda gpus: Layout(replicate=gpus),
    "FSDP2": lambda gpus: Layout(shard=gpus),
    "HSDP, 8 shards": lambda gpus: Layout(replicate=gpus // 8, shard=8),
    "HSDP, 64 shards": lambda gpus: Layout(replicate=max(gpus // 64, 1), shard=min(gpus, 64)),
    "HSDP, 8 shards, TP 8": lambda gpus: Layout(max(gpus // 64, 1), min(gpus // 8, 8), 8),
}


def published_table() -> str:
    """The model against published figures."""
    model, rows = build("gpt_8b"), []
    for which, published in TITAN.items():
        mfu, waiting = calibrated(which)
        for gpus, rate in published.items():
            found = TITAN_TOKENS / step(model, Layout(shard=gpus), TITAN_TOKENS, mfu, waiting).total
            used = "yes" if gpus == 8 or which == "compiled" else "no"
            rows.append([f"torchtitan, 8B, FSDP2, {which}", f"{gpus} GPUs", f"{rate:,}", f"{found:,.0f}", used])
    # 24 blocks of width 2,048 on texts of 4,096 tokens: not in the logs; they fit the logged TFLOP/s.
    small = Transformer(2048, 24, 32, 32, 8192, False, 50272, 4096)
    per_token = NANOTRON_TFLOPS * 1e12 / NANOTRON[2]
    rates = {}
    for ranks in NANOTRON:
        tokens = 8 * 4096 / ranks
        busy = tokens * per_token / (PEAK * calibrated()[0])
        rates[ranks] = tokens / (busy + tensor_parallel(Model(small, 0, 0, ()), ranks, tokens))
    for ranks, rate in NANOTRON.items():
        found = rates[ranks] / rates[2]
        used = "(1.00)" if ranks == 2 else "no"
        row = [f"nanotron, 1B, TP {ranks}, DDP {8 // ranks}", "8 GPUs", f"{rate / NANOTRON[2]:.2f}", f"{found:.2f}"]
        rows.append([*row, used])
    return table(["run", "on", "published", "model", "calibrated on it"], rows)


def local_table() -> str:
    """Steps on this machine's processes, from collectives that were measured alone."""
    with torch.device("meta"):
        model = GPT(**SHAPE)
    count = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    units, rows = [*blocks, count - sum(blocks)], []
    for ranks, found in MEASURED["steps"].items():
        seconds = {name: entry["cpu"] for name, entry in found["steps"].items()}
        cost = {name: fit(times) for name, times in found["collectives"].items()}
        collectives = {
            "ddp": cost["all_reduce"](4.0 * count),
            "fsdp2": sum(2 * cost["all_gather"](4.0 * unit) + cost["reduce_scatter"](4.0 * unit) for unit in units),
        }
        for name, label in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
            alone, together = (seconds[f"{name}, {group}"] for group in ("alone", "all"))
            expected = alone + collectives[name]
            row = [f"{label}, {ranks} processes", *map(ms, (alone, collectives[name], expected, together))]
            rows.append([*row, f"{expected / together:.2f}"])
    return table(["CPU time of a step, ms", "alone", "+ collectives", "= predicted", "measured", "ratio"], rows)


def fit(times: dict[str, dict[str, float]]) -> Callable[[float], float]:
    """Return a collective's CPU time as a function of its bytes: a latency, and a time per byte."""
    points = sorted((int(size), entry["cpu"]) for size, entry in times.items())
    (_, latency), (size, seconds) = points[0], points[-1]
    return lambda wanted: latency + wanted * max(seconds - latency, 0.0) / size


def step_table(name: str, tokens_of: Callable[[int], float], least: int = 8) -> str:
    """Time of a step and of its communication, for a number of tokens per GPU."""
    model, (mfu, waiting), rows = build(name), calibrated(), []
    for gpus in (number for number in GPUS if number >= least):
        tokens, cells = tokens_of(gpus), []
        for make in LAYOUTS.values():
            layout = make(gpus)
            if tokens * layout.tensor < TEXT:
                cells.append("-")
            elif not fits(model, layout, tokens):
                cells.append("memory")
            else:
                found = step(model, layout, tokens, mfu, waiting)
                cells.append(f"{sec(found.total)} · {sec(found.communication)} ({sec(found.exposed)})")
        rows.append([f"{gpus:,}", f"{tokens:,.0f}", *cells])
    return table(["GPUs", "tokens per GPU", *LAYOUTS], rows)


def limits_table() -> str:
    """The most GPUs on which a strategy keeps 90 % of the throughput that computing alone has."""
    (mfu, _), rows = calibrated(), []
    for name, label in (("gpt_1b", "1B"), ("gpt_8b", "8B")):
        model = build(name)
        for tokens in (TITAN_TOKENS, TEXT):
            cells = []
            for make in LAYOUTS.values():
                best = 0
                for power in range(3, 15):
                    gpus = 2**power
                    layout = make(gpus)
                    if tokens * layout.tensor < TEXT or not fits(model, layout, tokens):
                        continue
                    found = step(model, layout, tokens, mfu, 0.0)
                    if found.compute >= 0.9 * found.total:
                        best = gpus
                room = any(fits(model, make(2**power), tokens) for power in range(3, 15))
                cells.append(f"{best:,}" if best else "none" if room else "memory")
            rows.append([label, f"{tokens:,}", *cells])
    return table(["model", "tokens per GPU", *LAYOUTS], rows)


def interval_table() -> str:
    """When to save the 8B model, by the failure rate of Llama 3's run."""
    parameters, rows = build("gpt_8b").parameters, []
    for gpus in GPUS:
        between = DAYS * 86400 * DAYS_GPUS / INTERRUPTIONS / gpus
        size = 12.0 * parameters / gpus * NODE  # weights and Adam's averages, on each machine's disk
        row = [f"{gpus:,}", hours(between), f"{size / 1e9:.3g} GB"]
        together = exchanges("random states", gpus) / 1e3
        for delay in (
            size * SAVE_SECONDS / SAVE_BYTES + exchanges("sharded save", gpus) / 1e3 + together,
            size * STALL_SECONDS / SAVE_BYTES + together,  # the rest is done beside training
        ):
            young, interval = math.sqrt(2 * delay * between), daly(delay, between)
            lost = delay / interval + (interval / 2 + delay + RESTART) / between
            row += [sec(delay), f"{hours(young)} / {hours(interval)}", f"{lost:.1%}"]
        rows.append(row)
    head = ["GPUs", "time between failures", "state per machine", "a save", "every (Young / Daly)", "lost"]
    return table([*head, "asynchronous: the step waits", "every (Young / Daly)", "lost"], rows)


FORMS: dict[str, str] = {
    "start": "N",
    "exchange of requests": "log N",
    "metrics": "N",
    "random states": "N",
    "sharded save": "N",
    "config check": "N",
}
HOW_OFTEN = {
    "start": "start",
    "exchange of requests": "second",
    "metrics": "`LOG.PERIOD`",
    "random states": "save",
    "sharded save": "save",
    "config check": "start",
}


def rank0(entry: dict[str, float]) -> float:
    """Milliseconds that rank 0 computes."""
    return entry.get("cpu_rank0_ms", entry["cpu_ms"])


def exchanges(name: str, ranks: int) -> float:
    """Milliseconds that rank 0 computes, extrapolated by the form of the growth."""
    measured = {int(key.split()[0]): entry for key, entry in MEASURED["exchanges"][name].items()}
    form: Callable[[float], float] = math.log2 if FORMS[name] == "log N" else float
    points = [(form(number), rank0(entry)) for number, entry in sorted(measured.items())]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return max(y + slope * (form(ranks) - x), 0.0)


def exchange_table() -> str:
    """What the engine's exchanges cost rank 0, measured and extrapolated."""
    rows = []
    for name, form in FORMS.items():
        found = [ms(rank0(entry) / 1e3) for entry in MEASURED["exchanges"][name].values()]
        rows.append([name, HOW_OFTEN[name], *found, form, *(ms(exchanges(name, n) / 1e3) for n in (1024, 16384))])
    ranks = [key.split()[0] for key in MEASURED["exchanges"]["metrics"]]
    return table(["rank 0 computes, in ms", "once per", *ranks, "form", "1,024", "16,384"], rows)


def failure_table() -> str:
    """How long a failure takes."""
    found = MEASURED["exchanges"]["failure"]
    row = ["from the death of a rank until all have ended, s", *(f"{e['wall_ms'] / 1e3:.2f}" for e in found.values())]
    return table(["ranks", *(key.split()[0] for key in found)], [row])


TABLES: dict[str, Callable[[], str]] = {
    "published": published_table,
    "local": local_table,
    "8b": lambda: step_table("gpt_8b", lambda gpus: TITAN_TOKENS),
    "1b": lambda: step_table("gpt_1b", lambda gpus: TITAN_TOKENS),
    "8b fixed": lambda: step_table("gpt_8b", lambda gpus: 2**24 / gpus, 512),
    "limits": limits_table,
    "intervals": interval_table,
    "exchanges": exchange_table,
    "failure": failure_table,
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def sec(seconds: float) -> str:
    """``"0.012 s"``, with two or three digits."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def ms(seconds: float) -> str:
    """Milliseconds, with two digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def hours(seconds: float) -> str:
    """Hours, or minutes below two hours, or days above two."""
    if seconds < 7200:
        return f"{seconds / 60:.2g} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:,.0f} d"


def page() -> str:
    """Return the page with its tables computed again."""

    def renewed(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]]()}{match[3]}"

    return re.sub(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", renewed, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    write_or_check({PAGE: page()})

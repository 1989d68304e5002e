"""The report of ``hookline diverge`` as text."""

from collections.abc import Mapping
from textwrap import indent
from typing import Any

from .report import changes_text

__all__ = ["diverge_text"]


def diverge_text(report: Mapping[str, Any]) -> str:
    """Return the report as text for the console."""
    lines = ["Config: " + ("the same" if not report["config"] else "different")]
    lines += [indent(report["config"], "  ")] if report["config"] else []
    lines += _pair("Versions", report["versions"]) + _pair("Ranks", report["ranks"])
    lines += ["", *_files(report)]
    replay = report["replay"]
    if replay is not None and "impossible" in replay:
        lines += ["", f"The runs cannot be replayed: {replay['impossible']}"]
    elif replay is not None:
        lines += ["", *_replays(report, replay)]
    return "\n".join(lines)


def _pair(title: str, values: list[Any]) -> list[str]:
    one, other = (value or "not known" for value in values)
    return [f"{title}: {one}" if one == other else f"{title}: different\n  {one}\n  {other}"]


def _files(report: Mapping[str, Any]) -> list[str]:
    metrics, prints = report["metrics"], report["fingerprints"]
    lines = []
    if not metrics["values"]:
        lines.append("Metrics: no iteration in both")
    elif (found := metrics["first_difference"]) is None:
        lines.append(f"Metrics: all {metrics['values']} values are equal to the bit")
    else:
        values = f"{found['run']!r} and {found['other']!r}"
        lines.append(
            f"Metrics: the first difference is at iteration {found['iteration']}: {found['metric']} is {values}"
        )
    if not prints["lines"]:
        lines.append("Fingerprints: no iteration in both (add the hook Fingerprints)")
    elif (found := prints["first_difference"]) is None:
        lines.append(f"Fingerprints: all {prints['lines']} are equal")
    else:
        before = f"equal at iteration {prints['last_equal']}, " if prints["last_equal"] >= 0 else ""
        lines.append(f"Fingerprints: {before}different at iteration {found['iteration']} in {', '.join(found['in'])}")
    if report["equal"]:
        ends, runs = report["last_iterations"], report["runs"]
        shorter = runs[ends.index(min(ends))]
        until = "" if ends[0] == ends[1] else f" up to iteration {min(ends)}, the last one of {shorter}"
        lines.append(f"The runs are equal{until}.")
    return lines


def _replays(report: Mapping[str, Any], replay: Mapping[str, Any]) -> list[str]:
    starts = " and ".join(dict.fromkeys(name or "the beginning" for name in replay["checkpoints"]))
    lines = [f"Replayed both runs from {starts}."]
    each = zip(report["runs"], report["versions"], replay["unlike"], replay["errors"], strict=True)
    for run, version, unlike, error in each:
        if error:
            lines.append(f"The replay of {run} fails at {error}")
        if unlike is not None:
            where = f"at iteration {unlike['iteration']} in {', '.join(unlike['in'])}"
            lines.append(f"The replay of {run} is not equal to the run, {where}:")
            if unlike["config_changes"]:
                lines.append(f"  {changes_text(unlike['config_changes'])}")
            elif version != report["version_now"]:
                lines.append(f"  the run: {version or 'not known'}\n  now: {report['version_now']}")
            else:
                lines.append("  its code or data changed since, or its steps are not deterministic")
    if "first" not in replay and (found := replay["metric"]):
        values = f"{found['run']!r} and {found['other']!r}"
        lines.append(f"The training steps are equal; at iteration {found['iteration']} {found['metric']} is {values}:")
        return [*lines, "  it comes from a hook or an evaluation"]
    if "first" not in replay:
        return [*lines, "The replays are equal: a replay does not repeat what parted the runs."]
    first, at = replay["first"], replay["iteration"]
    where = f"at iteration {at}" if at >= 0 else "before the first step"
    where += f" on rank {replay['rank']}" if max(report["ranks"]) > 1 else ""
    who = "runs" if replay["unlike"] == [None, None] else "replays"
    lines.append(f"The {who} part {where}, in {_what(first)}. {_cause(replay)}".rstrip())
    lines.append(f"  different in this step: {', '.join(replay['in'])}")
    lines += [f"  {line}" for line in _samples(first)]
    for key in ("output", "gradient"):
        if key in replay:
            later = f", at iteration {replay[key]['iteration']}" if replay[key]["iteration"] != at else ""
            lines.append(f"  first {key} that differs: {replay[key]['name']}{later}{_amount(replay[key])}")
    return lines


def _what(entry: Mapping[str, Any]) -> str:
    kind, name = entry["kind"], entry["name"]
    other = f" (in the other run: {entry['other_name']})" if "other_name" in entry else ""
    fixed = {"samples": "the batch", "batch": "the batch", "optimizer": "the optimizer's state"}
    of = " of" if kind in ("output", "gradient", "generator") else ""
    return fixed.get(kind, f"the {kind}{of} {name}") + other


def _cause(replay: Mapping[str, Any]) -> str:
    """Return what the first difference means."""
    kind, differ = replay["first"]["kind"], replay["in"]
    if kind == "samples":
        return "It has other samples."
    if kind == "batch":
        return "It has the same samples with other values." if replay["first"]["batch_size"] else ""
    if kind == "optimizer":
        return "The weights are equal: a setting such as the learning rate differs."
    if replay["iteration"] < 0:
        seed = "another SEED, or random numbers that are drawn while the run is built"
        return f"The weights are equal: {seed}." if kind == "generator" else "The SEED or the model differs."
    if kind == "output":
        same = "The batch and the weights are equal"
        if "generators" in differ:
            return f"{same}, and the generators differ after the step: the runs draw other random numbers."
        return f"{same}, and so are the generators: the module computes something else, or is not deterministic."
    if replay["whole_steps"]:
        return "Outputs and gradients are not known: each step runs as a whole (COMPILE_STEP, CUDA_GRAPH)."
    return {
        "loss": "All outputs of modules are equal: the loss differs, or is not deterministic.",
        "gradient": "All outputs and losses are equal: the backward pass differs, or is not deterministic.",
        "generator": "The weights are equal after the step: one run draws more random numbers, in a hook for example.",
    }.get(kind, "All gradients are equal: the update differs, or a hook changes the value.")


def _samples(first: Mapping[str, Any]) -> list[str]:
    if "other_samples" in first:
        return [f"samples: {indices}" for indices in first["other_samples"]]
    if not first.get("samples"):
        return []
    indices = first["samples"]
    which = "all" if len(indices) == first["batch_size"] else ", ".join(map(str, indices))
    return [f"samples that differ: {which} ({len(indices)} of {first['batch_size']}){_amount(first)}"]


def _amount(entry: Mapping[str, Any]) -> str:
    if "shapes" in entry:
        return ", in shape: {} and {}".format(*entry["shapes"])
    if "max_absolute" not in entry:
        return ""
    return f", by at most {entry['max_absolute']:.3g} (relative {entry['max_relative']:.3g})"

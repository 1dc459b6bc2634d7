"""What the demo prints, made from the answers of the two sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compare import Comparison
    from instance import Served

__all__ = ("request_summary",)

_MIB = 1024 * 1024


def request_summary(question: str, served: Served, comparison: Comparison) -> str:
    """One request in a few lines; the verdict begins the last one."""
    reports = [answer["report"] for answer in served.received]
    total = {
        fact: sum(report[fact] for report in reports)
        for fact in ("bytes", "descriptors", "waves", "zeroed_tokens")
    }
    # Of several ranks, the slowest in each phase.
    phases_s = {
        phase: max(report["phases_s"].get(phase, 0.0) for report in reports)
        for phase in reports[0]["phases_s"]
    }
    prompt = served.prefilled["prompt_tokens"]
    computed = served.admitted["computed_tokens"]
    rows = {
        "question": question,
        "answer": served.continued["text"],
        "tokens": f"{prompt} of prompt, {computed} of them already held, "
        f"{comparison.tokens} continued",
        "moved": f"{total['bytes'] / _MIB:.2f} MiB ({total['bytes']} bytes) for "
        f"{prompt - computed} tokens, in {total['descriptors']} descriptors and "
        f"{total['waves']} wave(s); {total['zeroed_tokens']} slots zeroed",
        "phases": _phases(phases_s),
        "throughput": _throughput(served, total["bytes"], phases_s),
        "overlap": _overlap(served, total["bytes"]),
    }
    lines = [f"  {name:<11}{text}" for name, text in rows.items()]
    return "\n".join([served.request, *lines, str(comparison)])


def _overlap(served: Served, moved: int) -> str:
    """What of the transfer the prefill has hidden."""
    # Only a stream says: all others begin when the prefill has ended.
    hidden = served.prefilled.get("written_bytes", 0) / moved if moved else 0.0
    return (
        f"{hidden:.0%} of the bytes had left before the prefill ended; decode had all "
        f"of them {served.ready_s * 1000:.1f} ms after it"
    )


def _phases(phases_s: Mapping[str, float]) -> str:
    """Time per phase, in the order they happen.

    The library times the states of a pull or a landing, and of ``connecting`` apart what went
    into planning.
    """
    plan_s = phases_s.get("plan", 0.0)
    durations_s = {
        "handshake": phases_s.get("connecting", 0.0) - plan_s,
        "plan": phases_s.get("planned", 0.0) + phases_s.get("queued", 0.0) + plan_s,
        "read": phases_s.get("reading", 0.0),
        "confirm": phases_s.get("confirming", 0.0),
        "finish": phases_s.get("finishing", 0.0),
    }
    if "registered" in phases_s:
        # A landing waits where a pull reads: for the prefill, and for the bytes.
        del durations_s["read"], durations_s["confirm"]
        durations_s["wait and land"] = phases_s["registered"]
    return " | ".join(f"{name} {s * 1000:.2f} ms" for name, s in durations_s.items())


def _pull_s(phases_s: Mapping[str, float]) -> float:
    """The whole pull; the part of ``connecting`` that planned is in it once."""
    return sum(phases_s.values()) - phases_s.get("plan", 0.0)


def _throughput(served: Served, moved: int, phases_s: Mapping[str, float]) -> str:
    """Bytes per second, in the read phase and over all, and the model's pace."""
    prefilled, continued = served.prefilled, served.continued
    rates = {
        "read": _mib_per_s(moved, phases_s.get("reading", 0.0)),
        "whole transfer": _mib_per_s(moved, _pull_s(phases_s)),
        "prefill": f"{prefilled['prompt_tokens'] / prefilled['prefill_s']:.0f} tokens/s",
        "decode": f"{continued['steps'] / continued['decode_s']:.1f} tokens/s",
    }
    return ", ".join(f"{name} {rate}" for name, rate in rates.items())


def _mib_per_s(size_bytes: int, duration_s: float) -> str:
    """A rate, or a dash where nothing was timed."""
    return f"{size_bytes / _MIB / duration_s:.0f} MiB/s" if duration_s else "-"

"""What the benchmark prints."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.attention.memory import growth
from benchmarks.attention.records import Record, problems
from benchmarks.attention.targets import Outcome


def environment_line(record: Record) -> str:
    """`NVIDIA H200, driver 580.159, 16 cores, jax 0.11.2, ...`."""
    parts = [record["device"], f"{record['cores']} cores"]
    if record["driver"]:
        parts.append(f"driver {record['driver']}")
    parts += [f"{name} {version}" for name, version in record["versions"].items()]
    return ", ".join([*parts, record["date"]])


def time_lines(records: Iterable[Record]) -> Iterator[str]:
    """One block per shape and pass, the fastest candidate first, then those that declined."""
    for key, group in problems(records):
        timed = sorted((r for r in group if r["kind"] == "time"), key=lambda r: r["seconds"])
        refused = [r for r in group if r["kind"] == "refused"]
        baseline = timed[0].get("baseline") if timed else None
        yield ""
        yield f"{key['shape']} {key['dtype']} {key['pass']}" + (
            f"; baseline: {baseline}" if baseline else ""
        )
        yield f"  {'':28s}{'median':>11s}{'25-75 %':>9s}{'TFLOP/s':>9s}{'time/base':>11s}"
        yield from map(_time_line, timed)
        yield from (f"  {r['name']:28s}declined: {r['reason']}" for r in refused)


def _time_line(record: Record) -> str:
    low, high = record["seconds_25_75"]
    spread = (high - low) / record["seconds"]
    ratio = f"{record['ratio']:11.3f}" if "ratio" in record else ""
    return (
        f"  {record['name']:28s}{1e6 * record['seconds']:9.1f}µs{spread:9.1%}"
        f"{record['tflops']:9.3g}{ratio}"
    )


def target_lines(found: Sequence[Outcome]) -> Iterator[str]:
    """One line per target, shape and pass."""
    if found:
        yield "\nratios of times, round by round (median, 25-75 %)"
    for o in found:
        value, verdict = "not timed", ""
        if o.ratio is not None:
            value = f"{o.ratio:.3f}"
            verdict = {True: "met", False: "MISSED", None: "reported"}[o.met]
        spread = "" if o.spread is None else f"({o.spread[0]:.3f}-{o.spread[1]:.3f})"
        names = f"{o.target.name} / {o.other}"
        yield (
            f"  {o.shape:8s}{o.pass_name:18s}{names:42s}{value:>9s} {spread:15s} "
            f"<= {o.target.limit:<5g}{verdict}"
        ).rstrip()


def memory_lines(records: Iterable[Record]) -> Iterator[str]:
    """Memory by candidate and length, and the exponent with which it grows at the end."""
    found = [r for r in records if "length" in r]
    for name in dict.fromkeys(r["name"] for r in found):
        own = [r for r in found if r["name"] == name]
        rows = [r for r in own if r["kind"] == "memory"]
        values = "".join(f"{r['length']:7d}: {r['total_mib']:.0f} MiB" for r in rows)
        exponent = f"   ~ T^{growth(rows):.2f}" if len(rows) > 1 else ""
        yield f"{name:24s}{values}{exponent}"
        for r in own:
            if r["kind"] == "refused":
                yield f"{name:24s}{r['length']:7d}: declined: {r['reason']}"

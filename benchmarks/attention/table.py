"""Makes the lines and tables that the benchmark prints."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.attention.memory import growth
from benchmarks.attention.records import Record, problems
from benchmarks.attention.targets import Outcome
from lowprec_attn.tables import columns


def environment_line(record: Record) -> str:
    """Returns a line such as `NVIDIA H200, 16 cores, driver 580.159, jax 0.11.2, ...`."""
    parts = [record["device"], f"{record['cores']} cores"]
    if record["driver"]:
        parts.append(f"driver {record['driver']}")
    parts += [f"{name} {version}" for name, version in record["versions"].items()]
    return ", ".join([*parts, record["date"]])


def time_lines(records: Iterable[Record]) -> Iterator[str]:
    """Yields a block per shape and pass: the fastest candidate first, those that declined last."""
    for key, group in problems(records):
        timed = sorted((r for r in group if r["kind"] == "time"), key=lambda r: r["seconds"])
        refused = [r for r in group if r["kind"] == "refused"]
        baseline = timed[0].get("baseline") if timed else None
        yield ""
        yield f"{key['shape']} {key['dtype']} {key['pass']}" + (
            f"; baseline: {baseline}" if baseline else ""
        )
        rows = [
            ("", "median", "25-75 %", "TFLOP/s", "time/base", ""),
            *map(_time_row, timed),
            *((r["name"], "", "", "", "", f"declined: {r['reason']}") for r in refused),
        ]
        yield from columns(rows, "<>>>><").splitlines()


def _time_row(record: Record) -> tuple[str, ...]:
    low, high = record["seconds_25_75"]
    return (
        record["name"],
        f"{1e6 * record['seconds']:.1f}µs",
        f"{(high - low) / record['seconds']:.1%}",
        f"{record['tflops']:.3g}",
        f"{record['ratio']:.3f}" if "ratio" in record else "",
        "",
    )


def target_lines(found: Sequence[Outcome]) -> Iterator[str]:
    """Yields one line per target, shape and pass."""
    if found:
        yield "\nratios of times, round by round (median, 25-75 %)"
    rows = []
    for o in found:
        value, verdict = "not timed", ""
        if o.ratio is not None:
            value = f"{o.ratio:.3f}"
            verdict = {True: "met", False: "MISSED", None: "reported"}[o.met]
        spread = "" if o.spread is None else f"({o.spread[0]:.3f}-{o.spread[1]:.3f})"
        names = f"{o.target.name} / {o.other}"
        rows.append((o.shape, o.pass_name, names, value, spread, f"<= {o.target.limit:g}", verdict))
    yield from columns(rows, "<<<><<<").splitlines()


def memory_lines(records: Iterable[Record]) -> Iterator[str]:
    """Yields memory by candidate and length, and the exponent of its growth at the last lengths."""
    found = [r for r in records if "length" in r]
    rows = []
    for name in dict.fromkeys(r["name"] for r in found):
        own = [r for r in found if r["name"] == name and r["kind"] == "memory"]
        exponent = f"~ T^{growth(own):.2f}" if len(own) > 1 else ""
        values = (f"{r['length']}: {r['total_mib']:.0f} MiB" for r in own)
        rows.append((name, exponent, *values))
    yield from columns(rows, "<<" + ">" * max(map(len, rows), default=0)).splitlines()
    for r in found:
        if r["kind"] == "refused":
            yield f"{r['name']}, {r['length']}: declined: {r['reason']}"

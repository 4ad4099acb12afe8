"""Records as earlier versions wrote them: a file a run, a header and a line a step."""

import json


def write_older(directory, run, **header):
    """Writes `NAME.jsonl` from what `lab.archive` has of a run, with other fields of the header."""
    rows = [
        {"step": step, name: value}
        for name, column in run.columns.items()
        for step, value in column.items()
    ]
    rows += [
        {"step": step, "signals": {f"layer_{i}": layer for i, layer in enumerate(layers)}}
        for step, layers in run.signals.items()
    ]
    lines = [run.header | header, *rows]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{run.name}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path

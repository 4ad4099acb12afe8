"""A stand-in for `train.py` that ends at once as its arm says; tests of the lab share it."""

import json
import time

# Writes those outputs of the trainer that the lab reads, then does what `config.act` says.
STAND_IN = """
import json, os, pathlib, signal, sys, time
words = [word.lstrip("-").removeprefix("config.").split("=", 1) for word in sys.argv[1:]]
config = dict(words)
run = pathlib.Path(config.pop("workdir"))
run.mkdir(exist_ok=True)
same = ("versions", "backend", "device_kind", "device_count", "commit")
config["seed"] = int(config.get("seed", 42))
sizes = dict.fromkeys(("layers", "heads", "width", "context", "vocab_size"), 16)
words = dict.fromkeys(("init", "scale_placement"), "gpt2")
config["model"] = {**sizes, **words, "activation_dtype": "bfloat16"}
config["attention"] = {"numerics": "flash", "row_max": "standard"}
config["batch_size"], config["optimizer"] = 8, {"warmup_steps": 0}
(run / "config.json").write_text(json.dumps(config))
(run / "environment.json").write_text(json.dumps([dict.fromkeys(same, "x")]))
(run / "data_order.txt").write_text(f"{config['seed']},2\\n3,4\\n")
(run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\\n')
(run / "throughput.jsonl").write_text('{"step": 0, "seconds": 1.0}\\n')
act = config["act"]
begin = time.monotonic()
if act == "fail" and not (run.parent / "mended").exists():
    sys.exit("\\n".join(f"line {i} of the traceback" for i in range(9)))
if act == "nan":
    (run / "failure.json").write_text('{"step": 7, "message": "first in layer 1"}')
    sys.exit(3)
if act == "explode":
    failure = {"step": 7, "explosion": 3, "message": "the loss exploded at step 3"}
    (run / "failure.json").write_text(json.dumps(failure))
    sys.exit(3)
if act == "wait" and not (run.parent / "mended").exists():
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    print("listening", flush=True)
    time.sleep(60)
if act == "stopped":
    sys.exit(0)
if act == "slow":
    time.sleep(0.5)
if act == "report" and not (run.parent / "mended").exists():  # killed while it writes the report
    (run / "summary.json").write_text('{"val_loss": 2.5, "complete": false}')
    os.kill(os.getpid(), signal.SIGKILL)
(run / "summary.json").write_text('{"val_loss": 2.5, "complete": true}')
places = {"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "begin": begin, "end": time.monotonic()}
(run / "places.json").write_text(json.dumps(places))
"""


def wait_until(holds):
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rewrite(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))

"""GPT-2 in Flax, and everything that trains it: data, optimizer, checkpoints, metrics, report."""

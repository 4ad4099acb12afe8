"""Judges the health of a run from its records: spikes, explosions, rollbacks, incidents."""

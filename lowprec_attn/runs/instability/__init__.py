"""What the records of a run say of its health: spikes, explosions, rollbacks, incidents."""

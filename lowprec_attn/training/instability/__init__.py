"""A run whose loss leaves or is no longer finite: noticed, traced to a layer, sent back."""

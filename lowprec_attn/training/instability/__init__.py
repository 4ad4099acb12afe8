"""Notices a loss that explodes or is not finite, traces it to a layer, and rolls the run back."""

"""Opens a user's own files for `diagnostics`, which takes arrays."""

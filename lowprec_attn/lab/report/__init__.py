"""Reports of experiments: outcomes of arms, tables, figures, and what warnings were worth."""

"""What an experiment says: outcomes of its arms, tables, figures, what warnings were worth."""

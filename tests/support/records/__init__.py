"""Made-up records of runs, in the format of this version and earlier ones."""

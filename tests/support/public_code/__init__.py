"""The public code of arXiv 2510.04212: a reading of it, its record, and calls of the library."""

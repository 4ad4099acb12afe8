"""The public code of arXiv 2510.04212: read, recorded, and called as the library does."""

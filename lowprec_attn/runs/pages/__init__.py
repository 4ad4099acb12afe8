"""The page of a run, one file of HTML that needs no network.

`markup` holds the elements and needs no package, `drawing` and `figures` the figures, `layers` the
table of a layer's signals, `run` the page. Imports `runs` and what it may import.
"""

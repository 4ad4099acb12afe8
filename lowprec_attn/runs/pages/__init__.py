"""The page of a run, a single HTML file that needs no network.

`markup` makes the page's elements with the standard library. `drawing` and `figures` make the
figures, `layers` the tables of the layers' signals, and `run` the page. This package imports `runs`
and whatever `runs` may import.
"""

"""Pages of HTML about runs, each one file that needs no network: of one run, of several.

`markup` holds the elements and needs no package, `drawing` and `figures` the figures, `layers` the
table of a layer's signals, `run` and `comparison` a page each. Imports `runs` and what it may
import.
"""

"""Commands, processes and pages from the outside: broken inputs, kills, a browser."""

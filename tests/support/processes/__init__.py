"""Commands, processes and pages, seen from outside: broken inputs, kills, a browser."""

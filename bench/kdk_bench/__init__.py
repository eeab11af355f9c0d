"""How well an operator does: check, benchmark, report, and the command line."""

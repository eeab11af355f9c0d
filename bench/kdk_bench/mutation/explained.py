"""Mutants that no check can kill because they equal the original, each with the reason.

An entry that matches no mutant, or one that a check kills, fails the run: the list never outlives what it explains.
"""

EXPLAINED: dict[str, str] = {}

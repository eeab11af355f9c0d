"""The check is checked: faults planted in every kernel, one at a time, and what the quick tier makes of them.

    units.py      what is mutated: the functions behind one operator, direction and language
    mutators.py   the classes of faults, on Python's syntax trees; they know the kernel languages and no operator
    mutants.py    every mutant of a unit, and a sample of them
    trial.py      one mutant, swapped in and judged on the quick tier's cases until one fails
    workers.py    processes that live on, and are replaced when a mutant hangs or kills one
    explained.py  the mutants that equal the original, each with the reason
    report.py     kills per operator, direction and language, and what must hold

`python -m kdk_bench.mutation` runs them all.
"""

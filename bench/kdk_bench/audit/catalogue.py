"""Formulas that models spell out and no operator fills yet."""

from __future__ import annotations

from kdk_bench.audit.chains import Chain

CATALOGUE: tuple[Chain, ...] = ()

"""Shapes of real models for linear_recurrence: B sequences of T steps of D channels."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"T": Dim(), "B": Dim(), "D": Dim()},
    largest={"a": 1.0},
    scalars={"reverse": (False, True)},
    models=(
        Case("recurrentgemma-2b", {"T": 2048, "B": 4, "D": 2560}),
        Case("recurrentgemma-9b", {"T": 8192, "B": 1, "D": 4096}),
        Case("hgrn-1.3b", {"T": 2048, "B": 8, "D": 2048}),
        Case("mingru, character model", {"T": 512, "B": 64, "D": 768}),
        Case("s5, path-x", {"T": 16384, "B": 32, "D": 256}, {"reverse": True}),
        Case("s5, a million steps", {"T": 1048576, "B": 1, "D": 64}),
    ),
)

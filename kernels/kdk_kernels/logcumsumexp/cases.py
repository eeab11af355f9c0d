"""Shapes of real models for logcumsumexp: B sequences of T steps of D channels."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"T": Dim(), "B": Dim(), "D": Dim()},
    models=(
        Case("mingru, character model", {"T": 512, "B": 64, "D": 768}),
        Case("minlstm, selective copying", {"T": 4096, "B": 16, "D": 384}),
    ),
)

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "G": Dim(minimum=1), "C": Dim(minimum=1, multiple="G"), "P": Dim(minimum=1)},
    models=(Case("one", {"N": 2, "G": 4, "C": 16, "P": 64}),),
    valid=lambda sizes, scalars: sizes["G"] <= 32,
)

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim(minimum=1), "K": Dim(at_most="H")},
    models=(Case("one", {"N": 8, "H": 64, "K": 2}),),
)

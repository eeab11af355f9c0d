from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "K": Dim(at_most="E", minimum=1), "E": Dim(minimum=1, at_least=16)},
    scalars={"scale": (None, 2.5), "kind": ("softmax", "sigmoid")},
    models=(Case("one", {"N": 8, "K": 2, "E": 64}),),
    valid=lambda sizes, scalars: sizes["K"] <= 16 and scalars["k"] == sizes["K"],
)

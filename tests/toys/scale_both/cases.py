from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim()}, scalars={"factor": (3.0,)}, models=(Case("one", {"N": 8, "H": 64}),)
)

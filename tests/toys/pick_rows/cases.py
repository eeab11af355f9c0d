from kdk.cases import Case, Cases, Dim

CASES = Cases(dims={"N": Dim(), "R": Dim(minimum=1), "H": Dim()}, models=(Case("one", {"N": 8, "R": 16, "H": 64}),))

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "H": Dim(minimum=1)},
    scalars={"dtype": ("int8", "float8_e4m3fn")},
    models=(Case("one", {"N": 8, "H": 64}),),
)

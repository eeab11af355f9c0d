from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "V": Dim(minimum=2)}, scalars={"ignore_index": (-100, 1)}, models=(Case("one", {"N": 8, "V": 64}),)
)

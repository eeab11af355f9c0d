"""Shapes of real models for group_norm_silu: N images, C channels in G groups, P pixels."""

from kdk.cases import Case, Cases, Dim

CASES = Cases(
    dims={"N": Dim(), "G": Dim(minimum=1), "C": Dim(minimum=1, multiple="G", at_least=10), "P": Dim()},
    scalars={"eps": (1e-5, 1e-6)},
    models=(
        Case("sdxl unet, 128x128", {"N": 2, "G": 32, "C": 320, "P": 128 * 128}),
        Case("sdxl unet, 64x64", {"N": 2, "G": 32, "C": 640, "P": 64 * 64}),
        Case("sdxl unet, 32x32 joined", {"N": 2, "G": 32, "C": 2560, "P": 32 * 32}),
        Case("stable diffusion 1.5 unet, 8x8", {"N": 2, "G": 32, "C": 1280, "P": 8 * 8}),
        Case("sdxl vae, 1024x1024", {"N": 1, "G": 32, "C": 128, "P": 1024 * 1024}, {"eps": 1e-6}),
        Case("sdxl vae, 128x128", {"N": 1, "G": 32, "C": 512, "P": 128 * 128}, {"eps": 1e-6}),
        Case("stable video diffusion, 14 frames", {"N": 2, "G": 32, "C": 320, "P": 14 * 72 * 128}),
        Case("cogvideox vae", {"N": 1, "G": 32, "C": 128, "P": 8 * 480 * 720}, {"eps": 1e-6}),
    ),
)

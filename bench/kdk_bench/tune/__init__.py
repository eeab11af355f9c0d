"""`kdk tune`: launch configurations searched by cost, and who wins in a model's blocks."""

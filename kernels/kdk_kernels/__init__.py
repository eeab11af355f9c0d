"""The operators of kdk: one folder each, found through the entry-point group `kdk.ops`."""

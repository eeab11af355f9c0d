"""`kdk bench`: how fast, measured where the device is here. What it is modelled at where it is not: `kdk_bench.modelled`."""

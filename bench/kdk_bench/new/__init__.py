"""`kdk new`: the folder of a new operator, from nothing or from a finding of `kdk audit`."""

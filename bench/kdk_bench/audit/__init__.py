"""`kdk audit`: which operators and libraries of a model a platform lacks, what that costs, and what fills the gap."""

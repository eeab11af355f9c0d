"""Every kernel through its target's own compiler, without the target: what compiles, and what it uses."""

"""docs/operators/*.md and the README's table of operators, from the declarations and the store of evidence."""

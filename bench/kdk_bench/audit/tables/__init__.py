"""Dated tables of what platforms support, and the scripts that make them."""

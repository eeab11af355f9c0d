"""Kernel languages. Each package has launch.py (device), simulate.py (CPU) and, where it can, compile.py."""

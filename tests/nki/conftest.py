"""The emulator stands in for the vendor's package in all tests of this folder."""

from kdk.backends.nki import emulator

emulator.install()

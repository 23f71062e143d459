"""Puts this folder on the import path: tests import the specification as `reference`."""

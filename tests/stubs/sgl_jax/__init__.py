"""Stands where SGLang would be installed: with this folder's parent on PYTHONPATH."""

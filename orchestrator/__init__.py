"""Decides which adapter lives on which worker, and makes it so."""

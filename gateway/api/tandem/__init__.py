"""Tandem's own routes, for the command line and for scripts."""

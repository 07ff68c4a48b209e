"""Configurations: composed from recipe, overrides and flags (`compose`), then checked as a whole (`validate`)."""

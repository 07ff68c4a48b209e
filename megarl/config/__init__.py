"""Configurations: composed of recipe, overrides and flags (`compose`), then judged as a whole (`validate`)."""

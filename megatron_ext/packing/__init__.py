"""Packs sequences into micro-batches: balances the work over ranks, and computes shared prefixes once."""

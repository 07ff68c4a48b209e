"""Who runs where: what roles ask for, which machines have room, and taking it."""

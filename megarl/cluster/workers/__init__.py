"""Worker processes: calls that are begun in them, results that come back, and signs of life."""

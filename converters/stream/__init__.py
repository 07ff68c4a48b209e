"""Conversion as a stream: threads read from sources and write to targets; a journal lets an interrupted run resume."""

"""A conversion as a stream: threads read from sources and write to targets, with a journal to go on from."""

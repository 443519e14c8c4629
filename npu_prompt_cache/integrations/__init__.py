"""The cache inside other people's engines."""

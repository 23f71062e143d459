"""Chat formats: one package per format."""

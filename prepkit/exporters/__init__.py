"""A ``Config`` as a file, of prepkit or of others."""

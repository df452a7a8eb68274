"""`shoal demo`: a real run as a stranger would see it. Everything it does goes through the public command and API."""

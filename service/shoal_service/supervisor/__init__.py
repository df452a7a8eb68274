"""One supervisor per job: the thin shell around the pure attempt machine. Everything here may speak Ray."""

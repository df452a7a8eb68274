"""The `shoal` command. A thin client of the REST API: it parses, asks, prints, and decides nothing."""

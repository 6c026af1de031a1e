"""Looking inside: trees, specs, plans, tile maps as text, and checks of every schedule against the oracle."""

"""Looking inside: trees, specs, plans, tile maps as text, and checks of every rung against the oracle."""

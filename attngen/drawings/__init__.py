"""Pictures as SVG: each is a function of plain data of a plan, a trace or a table, and draws only what the data says."""

"""Plans, findings, differences and rules as plain text: no colour, no width of a terminal, no torch."""

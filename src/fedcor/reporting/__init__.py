"""Records to numbers, and numbers to a verdict, tables, plots, explanations and a page."""
